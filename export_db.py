#!/usr/bin/env python3
"""The seeds' export_db.py; see `./export_db.py --help`."""

from tuna.cli.script import run

if __name__ == "__main__":
    run("tuna_mituna.db_files", "export_db_main")
