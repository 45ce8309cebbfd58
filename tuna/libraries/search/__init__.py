"""A search that learns from what was measured: pure functions of a space and its history; no SQL,
no queue, no clock."""
