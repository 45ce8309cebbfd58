"""Commands that look at a session: status, export, report."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import click

from tuna.cli import actions, options
from tuna.cli.console import print_json, print_table


@click.command()
@click.option("--session-id", type=click.IntRange(min=1), help="Only this session, with its failures.")
@options.as_json
def status(session_id: int | None, as_json: bool) -> None:
    """Show sessions, their jobs by state, and why jobs failed."""
    documents = _documents(session_id)
    if as_json:
        print_json(documents)
    else:
        _print(documents, details=session_id is not None)


def print_sessions(library: str) -> None:
    """Print the sessions of a library."""
    _print([document for document in _documents(None) if document["library"] == library], details=False)


def _documents(session_id: int | None) -> list[dict[str, Any]]:
    from tuna.cli.database import open_database
    from tuna.db import jobs, sessions
    from tuna.db.engine import reading

    with reading(open_database()) as connection:
        counts = jobs.all_by_state(connection)
        chosen = [session_id] if session_id is not None else list(counts)
        infos = [sessions.get(connection, number) for number in chosen]
        failures = {number: jobs.failures(connection, number) for number in chosen}
    return [
        {
            "session": info.id,
            "library": info.environment.library,
            "reason": info.reason,
            "environment": info.environment.key,
            "arch": info.environment.arch,
            "jobs": dict(sorted(counts.get(info.id, {}).items())),
            "in_flight": sum(n for state, n in counts.get(info.id, {}).items() if state in _IN_FLIGHT),
            "failures": [_failure(*failure) for failure in failures[info.id]],
        }
        for info in infos
    ]


#: Spelt out: the states' module would load the pipeline, and this command has to answer at once. A test compares.
_IN_FLIGHT = frozenset({"compile_queued", "compiling", "eval_queued", "evaluating"})


def _failure(cause: str, count: int, output: str, reproduce: str) -> dict[str, Any]:
    return {"cause": cause, "attempts": count, "output_tail": output, "reproduce": reproduce}


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
