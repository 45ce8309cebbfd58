"""Servers that Tuna uses: the embedded Redis, Redis clients and versions, TLS."""
