"""The service: what Tuna offers to people and programs over HTTP. Handlers call `tuna.api`."""
