"""`tuna doctor`: prints the findings on this machine and its services."""

from __future__ import annotations

from dataclasses import asdict

import click

from tuna import api
from tuna.cli import options, show
from tuna.cli.console import print_json


@click.command()
@options.as_json
def doctor(as_json: bool) -> int:
    """Check disk, database, Redis, broker, artifact store, cores and libraries; exit 1 if something must change.

    A warning is about what costs time, not data.
    """
    found = api.doctor()
    if as_json:
        print_json([asdict(finding) for finding in found])
    else:
        show.findings(found)
    return 0 if all(finding.ok for finding in found) else 1
