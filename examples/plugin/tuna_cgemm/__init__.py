"""An example of a library for Tuna: docs/plugins.md builds it from nothing."""
