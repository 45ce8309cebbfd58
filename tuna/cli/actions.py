"""What the commands of `tuna` and of the seeds' scripts do: one implementation under both."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from tuna.cli.database import open_database
from tuna.errors import BadInput
from tuna.settings import get_settings

if TYPE_CHECKING:
    from tuna.db.solvers import StoredSolver


def init_session(library: str, reason: str) -> int:
    """Make (or find) the session for this machine's environment; prints its id and environment."""
    from tuna.db import sessions
    from tuna.db.engine import writing
    from tuna.libraries.registry import get_library

    environment = get_library(library).environment()
    with writing(open_database()) as connection:
        session_id, new = sessions.create(connection, environment, reason)
    click.echo(f"session {session_id} ({'new' if new else 'already there'}): {describe(environment)}")
    return session_id


def describe(environment: Any) -> str:
    """An environment in one line."""
    words = [f"{environment.library} {environment.library_version}", f"{environment.arch} x {environment.num_cu}"]
    return ", ".join(words + ([environment.device] if environment.device else []))


@dataclass(frozen=True)
class Imported:
    """What an import did."""

    configs: int
    added: int
    tagged: int


def import_configs(path: Path, tag: str, *, strict: bool = False) -> Imported:
    """Import a file of driver commands under a tag; prints the counts and every rejected line."""
    from tuna.configs import parse_file
    from tuna.db import configs
    from tuna.db.engine import writing

    if not tag.strip() or len(tag) > 128:
        raise BadInput("A tag has 1 to 128 characters.", hint="give it with -t")
    parsed = parse_file(path)
    for rejection in parsed.rejections:
        click.echo(str(rejection), err=True)
    if strict:
        parsed.check_strict()
    if not parsed.configs:
        raise BadInput(f"{path} holds no layer that can be imported ({parsed.counts.total} lines).")
    with writing(open_database()) as connection:
        stored = configs.store(connection, parsed.configs, tag)
    c = parsed.counts
    click.echo(
        f"{c.total} lines: {c.accepted} accepted ({c.expanded} of them name several directions, {c.duplicates} repeat "
        f"earlier layers), {c.ignored} ignored, {c.unsupported} unsupported, {c.rejected} rejected"
    )
    click.echo(f"{len(parsed.configs)} layers: {stored.added} added, {stored.tagged} newly tagged {tag!r}")
    return Imported(len(parsed.configs), stored.added, stored.tagged)


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
) -> int:
    """Make the jobs of a session, for every applicable solver or for some; prints how many are new."""
    from tuna.db import jobs
    from tuna.db.engine import writing
    from tuna.libraries.registry import get_library
    from tuna.pipeline.states import State

    engine = open_database()
    library = get_library(session_library(session_id))
    names = [library.step(name).name for name in steps] or [step.name for step in library.steps]
    request = jobs.JobRequest(
        session_id, library.name, names, reason, State.NEW.value, tag=tag, solvers=tuple(solvers), options=options
    )
    with writing(engine) as connection:
        count = jobs.load(connection, request)
        pairs = jobs.pairs(connection, session_id, tag)
    if not pairs:
        hint = f"run: ./go_fish.py {library.name} --update_applicability --session_id {session_id}"
        raise BadInput(f"No solver is known to run these layers in session {session_id}.", hint=hint)
    click.echo(f"New jobs added: {count}")
    return count


def export(session_id: int, form: str, directory: Path, **options: Any) -> Path:
    """Write one database of the session; prints what is in it and, last, its path."""
    from tuna.db.engine import reading
    from tuna.exports import Form
    from tuna.exports import export as write

    with reading(open_database()) as connection:
        report = write(connection, session_id, Form(form), directory, **options)
    for reason, count in sorted(report.skipped.items()):
        click.echo(f"not exported: {count} ({reason})", err=True)
    click.echo(f"{report.entries} entries of {report.configs} layers")
    click.echo(str(report.path))
    return Path(report.path)


def write_report(session_id: int, path: Path) -> Path:
    """Write the session's report; prints its path."""
    from tuna.db.engine import reading
    from tuna.reports import write_report as write

    with reading(open_database()) as connection:
        written = write(connection, session_id, path)
    click.echo(str(written))
    return written


def enqueue(session_id: int, steps: Sequence[str], *, workers: bool = False, processes: int | None = None) -> int:
    """Work through the steps of a session until its jobs are through them; returns the number that errored."""
    from tuna.cli.console import ProgressView
    from tuna.libraries.registry import get_library
    from tuna.pipeline.run import default_workers, run_session

    engine = open_database()
    library = get_library(session_library(session_id))
    specs = default_workers(library, processes) if workers else []
    with ProgressView(f"session {session_id}") as view:
        state = run_session(engine, get_settings(), session_id, steps=steps, workers=specs, on_progress=view.update)
    if not state.total:
        raise BadInput(f"Session {session_id} has no jobs.", hint="load some: tuna load-jobs, or ./load_job.py")
    done = ", ".join(f"{count} {name}" for name, count in sorted(state.states.items()))
    click.echo(f"session {session_id}: {done}")
    return state.errored
