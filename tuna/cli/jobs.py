"""Commands that change jobs: retry, cancel."""

from __future__ import annotations

from collections.abc import Mapping

import click

from tuna import api
from tuna.cli import options
from tuna.cli.console import say
from tuna.messages import counted
from tuna.vocabulary import Cause

_jobs = click.option(
    "--job", "jobs", type=options.ID, multiple=True, help="Only this job; may come often."
)


@click.command()
@options.session_id
@click.option(
    "--cause",
    type=click.Choice([cause.value for cause in Cause]),
    help="Only jobs that failed of it.",
)
@_jobs
def retry(session_id: int, cause: str | None, jobs: tuple[int, ...]) -> None:
    """Send errored jobs back to the step that failed, as if it had never been tried.

    Canceled jobs begin anew if --job names them; so a search goes on of which they are rounds.
    """
    moved = api.retry(session_id, jobs=jobs, cause=cause)
    say(f"session {session_id}: {_count(moved, 'try again', 'at ')}")


@click.command()
@options.session_id
@click.option("--tag", help="Only jobs of layers with this tag.")
@_jobs
def cancel(session_id: int, tag: str | None, jobs: tuple[int, ...]) -> None:
    """End jobs that are not finished; results of their current attempts are refused.

    A search of which one round is canceled opens no more.
    """
    done = api.cancel(session_id, jobs=jobs, tag=tag)
    say(f"session {session_id}: {_count(done.states, 'canceled', 'were ')}")
    if not done.workers_told:
        say(
            "Redis is unreachable: workers finish their current chunks, whose results are refused.",
            err=True,
        )


def _count(moved: Mapping[str, int], what: str, mark: str) -> str:
    if not moved:
        return "no job is concerned"
    total = sum(moved.values())
    parts = ", ".join(f"{count} {mark}{name}" for name, count in sorted(moved.items()))
    return f"{counted(total, 'job')} {what} ({parts})"
