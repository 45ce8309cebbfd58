"""Predictors: cost models that are trained from the trials of a database (docs/search.md)."""
