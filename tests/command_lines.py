"""The programs that can be typed in, and how they end."""

from __future__ import annotations

from typing import NamedTuple

import click

from tuna.cli.main import tuna
from tuna.cli.mituna import databases, go_fish, layers

PROGRAMS: dict[str, click.Command] = {
    "tuna": tuna,
    "go_fish": go_fish.go_fish,
    "load_job": layers.load_job,
    "export_db": databases.export_db,
    "update_golden": databases.update_golden,
}


class Ended(NamedTuple):
    """How a command line ended."""

    code: int
    out: str
    err: str
