"""Layers that a running program asks its libraries for (docs/usage.md)."""
