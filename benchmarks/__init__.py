"""Benchmarks behind Tuna's performance claims: `scripts/bench NAME`."""
