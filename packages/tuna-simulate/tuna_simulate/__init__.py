"""Discrete-event simulation of the pipeline: the same policies over recorded or given stage times
(docs/scheduling.md)."""
