#!/usr/bin/env python3
"""The seeds' tuna/example/load_job.py: a job of the example library; see `./load_job.py --help`."""

from tuna.cli.mituna.load_job import main

if __name__ == "__main__":
    main()
