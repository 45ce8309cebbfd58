"""The life of a job in SQL: states, failures, the sessions that are served, rounds, finals."""
