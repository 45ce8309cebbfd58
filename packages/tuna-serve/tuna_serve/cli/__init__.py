"""The commands `tuna serve` and `tuna cache`."""
