#!/usr/bin/env python3
"""The seeds' load_job.py; see `./load_job.py --help`."""

from tuna.cli.script import run

if __name__ == "__main__":
    run("tuna_mituna.layer_jobs", "load_job_main")
