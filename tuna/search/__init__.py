"""Rounds of a search: proposals, parts, history, warm starts, stopping, finals."""
