#!/usr/bin/env python3
"""The seeds' update_golden.py; see `./update_golden.py --help`."""

from tuna.cli.golden import update_golden

if __name__ == "__main__":
    update_golden()
