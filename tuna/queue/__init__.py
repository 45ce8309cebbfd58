"""Everything that crosses Redis: claimed work items, messages, leases, results, heartbeats, names
of keys."""
