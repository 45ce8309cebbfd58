"""The service: what Tuna knows and tunes, for people and programs over HTTP."""
