"""The commands of models: they parse, call `tuna_models.api`, and print."""
