#!/usr/bin/env python3
"""The seeds' load_job.py; see `./load_job.py --help`."""

from tuna.cli.mituna.load_job import main

if __name__ == "__main__":
    main()
