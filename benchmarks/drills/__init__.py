"""Drills: hostile and broken inputs, run as a user runs them, under limits."""
