"""What the commands of `tuna` and of the seeds' scripts do: one implementation under both."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from tuna.cli.database import open_database
from tuna.errors import BadInput
from tuna.settings import get_settings

if TYPE_CHECKING:
    from celery import Celery

    from tuna.db.solvers import StoredSolver


def init_session(library: str, reason: str, facts: Mapping[str, str] | None = None) -> int:
    """Make (or find) the session for this machine's environment, or for that of `facts`; prints id and environment."""
    from tuna.db import sessions
    from tuna.db.engine import writing
    from tuna.libraries.registry import get_library

    found = get_library(library)
    environment = found.environment_by_hand(facts) if facts else found.environment()
    with writing(open_database()) as connection:
        session_id, new = sessions.create(connection, environment, reason)
    click.echo(f"session {session_id} ({'new' if new else 'already there'}): {describe(environment)}")
    return session_id


def describe(environment: Any) -> str:
    """An environment in one line."""
    words = [f"{environment.library} {environment.library_version}", f"{environment.arch} x {environment.num_cu}"]
    return ", ".join(words + ([environment.device] if environment.device else []))


def update_solvers(library: str) -> int:
    """Store the library's solvers."""
    from tuna.db import solvers
    from tuna.db.engine import writing
    from tuna.libraries.registry import get_library

    with writing(open_database()) as connection:
        count = solvers.update_solvers(connection, get_library(library))
    click.echo(f"{library} has {count} solvers")
    return count


def list_solvers(library: str) -> list[StoredSolver]:
    """The library's solvers as stored."""
    from tuna.db import solvers
    from tuna.db.engine import reading
    from tuna.libraries.registry import get_library

    with reading(open_database()) as connection:
        return solvers.list_solvers(connection, get_library(library).name)


def update_applicability(session_id: int, tag: str | None, library: str | None = None) -> int:
    """Work out which solvers can run which configs of the session."""
    from tuna.db import solvers
    from tuna.libraries.registry import get_library

    engine = open_database()
    found = solvers.update_applicability(engine, get_library(session_library(session_id, library)), session_id, tag)
    click.echo(f"{found.configs} layers, {found.pairs} applicable pairs of layer and solver")
    for name, count in sorted(found.unknown.items()):
        click.echo(f"left out: {name} applies to {count} layers but is no known solver", err=True)
    return found.pairs


def session_library(session_id: int, expected: str | None = None) -> str:
    """The library of the session; raises BadInput when another one was expected."""
    from tuna.db import sessions
    from tuna.db.engine import reading

    with reading(open_database()) as connection:
        name = sessions.get(connection, session_id).environment.library
    if expected is not None and name != expected:
        raise BadInput(f"Session {session_id} belongs to {name}, not to {expected}.")
    return name


def load_jobs(
    session_id: int,
    *,
    tag: str | None,
    steps: Sequence[str] = (),
    reason: str,
    solvers: Sequence[str] = (),
    options: Mapping[str, Any] | None = None,
    algorithm: str | None = None,
    only_dynamic: bool = False,
    only_tunable: bool = False,
    command: str | None = None,
    **columns: Any,
) -> int:
    """Make the jobs of a session, for every applicable solver or for some; prints how many are new.

    `columns` are further columns of `job` that a user sets. Raises BadInput for options that the library does not have.
    """
    from tuna.db import jobs
    from tuna.db.engine import writing
    from tuna.libraries.options import check
    from tuna.libraries.registry import get_library
    from tuna.vocabulary import State

    engine = open_database()
    library = get_library(session_library(session_id))
    wanted = {library.step(name).name for name in steps}
    names = [step.name for step in library.steps if not wanted or step.name in wanted]
    request = jobs.JobRequest(
        session_id,
        library.name,
        names,
        reason,
        State.NEW.value,
        tag=tag,
        solvers=tuple(solvers),
        options=check(library.options, options or {}, library.name),
        columns=columns,
        algorithm=algorithm,
        only_dynamic=only_dynamic,
        only_tunable=only_tunable,
        command=command,
    )
    with writing(engine) as connection:
        count = jobs.load(connection, request)
        pairs = jobs.pairs(connection, session_id, tag)
    if not pairs:
        hint = f"run: ./go_fish.py {library.name} --update_applicability --session_id {session_id}"
        raise BadInput(f"No solver is known to run these layers in session {session_id}.", hint=hint)
    click.echo(f"New jobs added: {count}")
    return count


def load_example_job(session_id: int, reason: str, options: Mapping[str, Any]) -> None:
    """A job of the example library, which runs a program and needs no layer of anybody's; prints how many are new."""
    from tuna.configs import GemmConfig
    from tuna.db import configs, solvers
    from tuna.db.engine import writing
    from tuna.libraries.options import check
    from tuna.libraries.registry import get_library

    engine, tag, library = open_database(), "example", get_library("example")
    check(library.options, options, library.name)  # before anything is written
    with writing(engine) as connection:
        configs.store(connection, [GemmConfig(m=1, n=1, k=1)], tag)
        solvers.update_solvers(connection, library)
    solvers.update_applicability(engine, library, session_id, tag)
    load_jobs(session_id, tag=tag, reason=reason, options=options)


def check_device(session_id: int, arch: str | None, num_cu: int | None) -> None:
    """Refuse a device that is not the session's, should one be named."""
    from tuna.db import sessions
    from tuna.db.engine import reading

    with reading(open_database()) as connection:
        there = sessions.get(connection, session_id).environment
    if arch not in (None, there.arch) or num_cu not in (None, there.num_cu):
        raise BadInput(f"Session {session_id} is for {there.arch} with {there.num_cu} compute units.")


def add_tables() -> None:
    """Create the tables, in whichever database the settings name; prints their names."""
    from tuna.cli.database import connect_database
    from tuna.db import schema
    from tuna.db.models import Base

    schema.upgrade(connect_database())
    click.echo(f"tables: {', '.join(sorted(Base.metadata.tables))}")


def print_status(library: str) -> int:
    """Show what this machine and its services can do for a library, then its sessions; 1 if something must change."""
    from tuna.cli.doctor import print_findings
    from tuna.cli.look import print_sessions

    good = print_findings(library)
    print_sessions(library)
    return 0 if good else 1


def celery_app() -> Celery:
    """The Celery app; importing it takes a while, so only who needs it does."""
    from tuna.celery_app import app

    return app


def execute_on_workers(command: str) -> int:
    """Run a command here and on the workers that allow it; prints each output; 1 if one of them failed."""
    from tuna.workers.remote_exec import execute

    worst = 0
    for answer in execute(command, get_settings(), celery_app):
        click.echo(f"== {answer.host}: {answer.text}")
        click.echo(answer.output.rstrip())
        worst = max(worst, 0 if answer.ok else 1)
    return worst


def write_report(session_id: int, path: Path) -> Path:
    """Write the session's report; prints its path."""
    from tuna.db.engine import reading
    from tuna.reports.html import write_report as write

    with reading(open_database()) as connection:
        written = write(connection, session_id, path)
    click.echo(str(written))
    return written


def enqueue(session_id: int, steps: Sequence[str], *, workers: bool = False, processes: int | None = None) -> int:
    """Work through the steps of a session until its jobs are through them; returns the number that errored."""
    from tuna.cli.console import ProgressView
    from tuna.libraries.registry import get_library
    from tuna.workers.session_run import default_workers, run_session

    engine = open_database()
    library = get_library(session_library(session_id))
    specs = default_workers(library, processes) if workers else []
    with ProgressView(f"session {session_id}") as view:
        state = run_session(
            engine, get_settings(), session_id, app=celery_app, steps=steps, workers=specs, on_progress=view.update
        )
    if not state.total:
        raise BadInput(f"Session {session_id} has no jobs.", hint="load some: tuna load-jobs, or ./load_job.py")
    done = ", ".join(f"{count} {name}" for name, count in sorted(state.states.items()))
    click.echo(f"session {session_id}: {done}")
    return state.errored
