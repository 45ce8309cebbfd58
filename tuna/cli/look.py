"""Commands that look at a session: status, export, report."""

from __future__ import annotations

from dataclasses import asdict
from pathlib import Path
from typing import Any

import click

from tuna.cli import actions, options
from tuna.cli.console import print_json, print_table


@click.command()
@click.option("--session-id", type=click.IntRange(min=1), help="Only this session, with its failures.")
@click.option("--watch", "stays", is_flag=True, help="Stay and show how things go, until Ctrl-C.")
@click.option(
    "--interval", type=click.FloatRange(min=0.2), default=2.0, show_default=True, help="Seconds between two looks."
)
@options.as_json
def status(session_id: int | None, stays: bool, interval: float, as_json: bool) -> None:
    """Show sessions, their jobs by state, and why jobs failed."""
    if stays:
        from tuna.cli.watch import watch

        watch(session_id, interval, as_json=as_json)
        return
    documents = _documents(session_id)
    if as_json:
        print_json(documents)
    else:
        _print(documents, details=session_id is not None)


@click.command()
@click.option("--listen", default="127.0.0.1:9464", show_default=True, metavar="HOST:PORT")
def metrics(listen: str) -> None:
    """Answer Prometheus at http://HOST:PORT/metrics, until Ctrl-C."""
    from tuna.cli.database import connect_database
    from tuna.reports.prometheus import serve
    from tuna.settings import get_settings

    serve(connect_database(), get_settings(), listen, lambda url: click.echo(f"metrics at {url}", err=True))


def print_sessions(library: str) -> None:
    """Print the sessions of a library."""
    _print([document for document in _documents(None) if document["library"] == library], details=False)


def _documents(session_id: int | None) -> list[dict[str, Any]]:
    from tuna.cli.database import open_database
    from tuna.db import overview

    engine = open_database()
    found = overview.read(engine, session_id)
    if session_id is not None and not found:
        from tuna.db import sessions
        from tuna.db.engine import reading

        with reading(engine) as connection:
            sessions.get(connection, session_id)  # raises NotFound with the sessions that there are
    return [
        {
            "session": session.session_id,
            "library": session.library,
            "reason": session.reason,
            "environment": session.environment,
            "arch": session.arch,
            "jobs": session.jobs,
            "in_flight": sum(number for state, number in session.jobs.items() if state in _IN_FLIGHT),
            "failures": [asdict(failure) for failure in session.failures],
        }
        for session in found
    ]


#: Spelt out: the states' module would load the pipeline, and this command has to answer at once. A test compares.
_IN_FLIGHT = frozenset({"compile_queued", "compiling", "eval_queued", "evaluating"})


def _print(documents: list[dict[str, Any]], *, details: bool) -> None:
    if not documents:
        click.echo("No sessions yet. Start one with: tuna init-session LIBRARY -l REASON")
        return
    rows = [
        (
            document["session"],
            document["library"],
            document["arch"],
            document["reason"],
            sum(document["jobs"].values()),
            document["in_flight"],
            ", ".join(f"{count} {state}" for state, count in document["jobs"].items()) or "no jobs",
            ", ".join(f"{f['attempts']} {f['cause']}" for f in document["failures"]) or "-",
        )
        for document in documents
    ]
    columns = ("session", "library", "arch", "reason", "jobs", "in flight", "by state", "failed attempts")
    print_table("", columns, rows, right=(0, 4, 5))
    for failure in documents[0]["failures"] if details else []:
        last = (failure["output_tail"].strip().splitlines() or ["(no output)"])[-1]
        click.echo(f"{failure['cause']} ({failure['attempts']}): {last}")
        if failure["reproduce"]:
            click.echo(f"  reproduce: {failure['reproduce']}")


@click.command()
@options.session_id
@click.option("-o", "--output", type=click.Path(path_type=Path, dir_okay=False), help="Default: session-N.html.")
def report(session_id: int, output: Path | None) -> None:
    """Write a session's report as one HTML file that needs nothing else."""
    actions.write_report(session_id, output or Path(f"session-{session_id}.html"))
