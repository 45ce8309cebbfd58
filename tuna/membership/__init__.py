"""Worker membership: join tokens, access control in Redis, heartbeats, cordon and drain."""
