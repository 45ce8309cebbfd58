"""The process that claims, publishes, drains and reaps, and the run that holds one."""
