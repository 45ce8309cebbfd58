"""Bytes by hash, signed: the store, where it keeps them, and the copies of a worker."""
