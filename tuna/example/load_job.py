#!/usr/bin/env python3
"""The seeds' tuna/example/load_job.py: a job of the example library; see `./load_job.py --help`."""

import sys
from pathlib import Path

if __name__ == "__main__":
    sys.path.insert(0, str(Path(__file__).resolve().parents[2]))
    from tuna.cli.script import run

    run("tuna_mituna.layer_jobs", "load_job_main")
