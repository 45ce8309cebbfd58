#!/usr/bin/env python3
"""The seeds' go_fish.py; see `./go_fish.py --help`."""

from tuna.cli.script import run

if __name__ == "__main__":
    run("tuna_mituna.go_fish", "main")
