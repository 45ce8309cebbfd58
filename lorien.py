#!/usr/bin/env python3
"""The seed's `python3 -m lorien`, from a checkout; see `python3 -m lorien --help`."""

from tuna.cli.script import run

if __name__ == "__main__":
    run("tuna_remote.cli.lorien", "main")
