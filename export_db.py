#!/usr/bin/env python3
"""The seeds' export_db.py; see `./export_db.py --help`."""

from tuna.cli.seed import export_db

if __name__ == "__main__":
    export_db()
