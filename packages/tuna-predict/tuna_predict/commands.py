"""The command of this package, for `tuna --help`."""

COMMANDS = {
    "predictor": (
        "tuna_predict.cli",
        "Train a predictor from the trials that there are, and use it.",
    )
}
