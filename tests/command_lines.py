"""The programs that can be typed in, and how they end."""

from __future__ import annotations

from typing import NamedTuple

import click

from tuna.cli.golden import update_golden_command
from tuna.cli.main import tuna
from tuna.cli.mituna import export_db, go_fish, load_job

PROGRAMS: dict[str, click.Command] = {
    "tuna": tuna,
    "go_fish": go_fish.go_fish,
    "load_job": load_job.load_job,
    "export_db": export_db.export_db,
    "update_golden": update_golden_command,
}


class Ended(NamedTuple):
    """How a command line ended."""

    code: int
    out: str
    err: str
