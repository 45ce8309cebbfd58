#!/usr/bin/env python3
"""The seeds' update_golden.py; see `./update_golden.py --help`."""

from tuna.cli.script import run

if __name__ == "__main__":
    run("tuna_mituna.db_files", "update_golden_main")
