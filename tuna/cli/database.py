"""`tuna db`: maintains the database."""

from __future__ import annotations

import click

from tuna import api
from tuna.cli.console import say


@click.group()
def db() -> None:
    """Look after the database."""


@db.command()
def upgrade() -> None:
    """Bring the schema of the database to the one that this version needs."""
    done = api.upgrade_database()
    say(f"{done.url}: schema {done.before or 'none'} -> {done.after}")
