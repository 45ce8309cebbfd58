#!/usr/bin/env python3
"""The seeds' export_db.py; see `./export_db.py --help`."""

from tuna.cli.mituna.export_db import main

if __name__ == "__main__":
    main()
