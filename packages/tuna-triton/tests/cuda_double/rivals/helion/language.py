"""The language, which is not run."""
