"""The spaces of TVM's solvers for `tuna.libraries.search`."""
