"""MIOpen's own databases: readers, writers, rules, and the exporters that make them from
results."""
