"""Contracts as pytest classes: a third party subclasses one to prove what it plugs in."""
