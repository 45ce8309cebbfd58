"""Tuna's performance claims, runnable: `scripts/bench NAME`."""
