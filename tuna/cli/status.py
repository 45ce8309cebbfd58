"""Commands that look at sessions: status, metrics, report."""

from __future__ import annotations

from dataclasses import asdict
from pathlib import Path
from typing import Any

import click

from tuna import api
from tuna.cli import options, show
from tuna.cli.console import print_json, say
from tuna.cli.watch import watch
from tuna.cli.winners import print_winners
from tuna.errors import BadInput
from tuna.messages import counted


@click.command()
@click.option("--session-id", type=options.ID, help="Only this session, with its failures.")
@click.option("--watch", "stays", is_flag=True, help="Stay and show how things go, until Ctrl-C.")
@click.option(
    "--interval",
    type=click.FloatRange(min=0.2),
    default=2.0,
    show_default=True,
    help="Seconds between two looks.",
)
@options.as_json
def status(session_id: int | None, stays: bool, interval: float, as_json: bool) -> None:
    """Show sessions, their jobs by state, and why jobs failed."""
    if stays:
        watch(session_id, interval, as_json=as_json)
        return
    found = api.status(session_id, commands=as_json or session_id is not None)
    if as_json:
        print_json([_document(session) for session in found])
    else:
        show.sessions(found, details=session_id is not None)
        # or there is nothing that they could leave undone
        if any(session.in_flight for session in found):
            show.aside(api.workers_aside())
    if letters := api.undrained_reports():
        reports = counted(letters, "report of a worker", "reports of workers")
        say(
            f"{reports} could not be drained: see the table dead_letter (docs/operations.md,"
            " Failures)",
            err=True,
        )


@click.command()
@click.option("--listen", default="127.0.0.1:9464", show_default=True, metavar="HOST:PORT")
def metrics(listen: str) -> None:
    """Answer Prometheus at http://HOST:PORT/metrics, until Ctrl-C."""
    api.serve_metrics(listen, lambda url: say(f"metrics at {url}", err=True))


def _document(session: api.Overview) -> dict[str, Any]:
    return {
        "session": session.session_id,
        "library": session.library,
        "reason": session.reason,
        "environment": session.environment,
        "arch": session.arch,
        "jobs": session.jobs,
        "without_solver": session.without_solver,
        "searches": {**asdict(session.searches), "total": session.searches.total},
        "in_flight": session.in_flight,
        "simulated": session.simulated,
        "noisy": session.noisy,
        **session.options.model_dump(mode="json"),
        "outlook": show.outlook(api.outlook(session.session_id))
        if session.options.deadline
        else {},
        "undrained": session.undrained,
        "fault": session.fault,
        "failures": [asdict(failure) for failure in session.failures],
    }


@click.command()
@options.session_id
@click.option("-o", "--output", type=options.OUTPUT_FILE, help="Default: session-N.html.")
@click.option(
    "--against",
    type=options.ID,
    help="Compare with the times of this session, such as the vendor's library.",
)
@options.as_json
def report(session_id: int, output: Path | None, against: int | None, as_json: bool) -> None:
    """Print the winners of a session, and write a report as one HTML file; or print all figures as
    JSON."""
    if as_json and output is not None:
        raise BadInput("With --json the figures are printed: leave -o out.")
    figures = api.report(session_id, against)
    if as_json:
        print_json(figures.as_json())
        return
    path = api.write_report(figures, output or Path(f"session-{session_id}.html"))
    print_winners(figures)
    say(str(path))
