"""Jobs, store and session of a model."""
