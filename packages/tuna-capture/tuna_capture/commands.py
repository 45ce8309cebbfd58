"""The command of this package, for `tuna --help`."""

COMMANDS = {
    "capture": (
        "tuna_capture.cli",
        "Run a program and import the layers that it asks its libraries for.",
    )
}
