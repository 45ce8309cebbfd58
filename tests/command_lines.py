"""The programs that can be typed in, and how they end."""

from __future__ import annotations

from typing import NamedTuple

import click

from tuna.cli.main import tuna
from tuna_mituna import db_files, go_fish, layer_jobs

PROGRAMS: dict[str, click.Command] = {
    "tuna": tuna,
    "go_fish": go_fish.go_fish,
    "load_job": layer_jobs.load_job,
    "export_db": db_files.export_db,
    "update_golden": db_files.update_golden,
}


class Ended(NamedTuple):
    """How a command line ended."""

    code: int
    out: str
    err: str
