#!/usr/bin/env python3
"""The seeds' go_fish.py; see `./go_fish.py --help`."""

from tuna.cli.seed import go_fish

if __name__ == "__main__":
    go_fish()
