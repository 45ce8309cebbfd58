"""The life of a job in SQL: states, release, failures, the reaper, the sessions that are served."""
