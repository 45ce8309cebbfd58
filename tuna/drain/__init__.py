"""Results from Redis into SQL: checks, attempts, the find db, dead letters."""
