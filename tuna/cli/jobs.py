"""Commands that decide about jobs: retry, cancel."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import click

from tuna.cli import actions, options
from tuna.settings import get_settings
from tuna.vocabulary import Cause

if TYPE_CHECKING:
    import sqlalchemy as sa

_jobs = click.option("--job", "jobs", type=click.IntRange(min=1), multiple=True, help="Only this job; may come often.")


@click.command()
@options.session_id
@click.option("--cause", type=click.Choice([cause.value for cause in Cause]), help="Only jobs that failed of it.")
@_jobs
def retry(session_id: int, cause: str | None, jobs: tuple[int, ...]) -> None:
    """Send errored jobs back to the step that failed, as if it had never been tried."""
    from tuna.pipeline import job_actions

    engine, library = _opened(session_id)
    moved = job_actions.retry(engine, library, job_actions.Selection(session_id, jobs, cause=cause))
    click.echo(f"session {session_id}: {_count(moved, 'try again', 'at ')}")


@click.command()
@options.session_id
@click.option("--tag", help="Only jobs of layers with this tag.")
@_jobs
def cancel(session_id: int, tag: str | None, jobs: tuple[int, ...]) -> None:
    """End jobs that are not finished; what workers have in hand for them no longer counts."""
    from tuna.pipeline import job_actions

    engine, library = _opened(session_id)
    done = job_actions.cancel(engine, library, job_actions.Selection(session_id, jobs, tag=tag))
    click.echo(f"session {session_id}: {_count(done.states, 'canceled', 'were ')}")
    _drop(engine, done.chunks)


def _opened(session_id: int) -> tuple[sa.Engine, Any]:
    from tuna.cli.database import open_database
    from tuna.libraries.registry import get_library

    return open_database(), get_library(actions.session_library(session_id))


def _count(moved: dict[str, int], what: str, mark: str) -> str:
    if not moved:
        return "no job is concerned"
    total = sum(moved.values())
    parts = ", ".join(f"{count} {mark}{name}" for name, count in sorted(moved.items()))
    return f"{total} {'job' if total == 1 else 'jobs'} {what} ({parts})"


def _drop(engine: sa.Engine, chunks: set[str]) -> None:
    """Tell workers that they can stop; without Redis they go on, and their results are refused."""
    if not chunks:
        return
    from tuna.db import sessions
    from tuna.db.engine import reading
    from tuna.errors import ServiceError
    from tuna.pipeline.connection import connect
    from tuna.pipeline.leases import Leases

    with reading(engine) as connection:
        namespace = sessions.namespace(connection)
    try:
        Leases(connect(get_settings()), namespace, get_settings().lease_s).drop(sorted(chunks))
    except ServiceError:
        click.echo("Redis is away: workers finish what they have in hand, and it is refused.", err=True)
