#!/usr/bin/env python3
"""The seeds' load_job.py; see `./load_job.py --help`."""

from tuna.cli.seed import load_job

if __name__ == "__main__":
    load_job()
