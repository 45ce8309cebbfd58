"""Results from Redis into SQL: checks, trials, winners, moves of jobs."""
