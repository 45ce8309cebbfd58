"""Results with their provenance: one selectable for sessions, imports, golden versions and trials,
and the answers that `tuna query` and exports read from it."""
