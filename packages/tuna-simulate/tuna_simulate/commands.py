"""The command of this package, for `tuna --help`."""

COMMANDS = {"simulate": ("tuna_simulate.cli", "Simulate sessions under a scheduling policy.")}
