#!/usr/bin/env python3
"""The seeds' go_fish.py; see `./go_fish.py --help`."""

from tuna.cli.mituna.go_fish import main

if __name__ == "__main__":
    main()
