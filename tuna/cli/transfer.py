"""Databases of kernel libraries, in and out."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from tuna.api import open_database
from tuna.errors import BadInput

if TYPE_CHECKING:
    from tuna.exports import ExportReport


def export(session_id: int, form: str, directory: Path, **options: Any) -> Path:
    """Write one database of the session; prints what is in it and, last, its path."""
    from tuna.db.engine import reading
    from tuna.exports import export as write

    with reading(open_database()) as connection:
        report = write(connection, session_id, form, directory, **_wanted(options))
    return _tell(report)


def export_golden(
    version: int, form: str, directory: Path, *, arch: str, num_cu: int | None, library: str = "miopen", **options: Any
) -> Path:
    """Write one database of a golden version for a device; prints what is in it and, last, its path."""
    from tuna.db.engine import reading
    from tuna.exports import export_golden as write

    with reading(open_database()) as connection:
        wanted = _wanted(options)
        report = write(connection, version, form, directory, library=library, arch=arch, num_cu=num_cu, **wanted)
    return _tell(report)


def _wanted(options: Mapping[str, Any]) -> dict[str, Any]:
    """The options that were given: a form refuses those that it does not have."""
    return {name: value for name, value in options.items() if value is not None and value is not False}


def _tell(report: ExportReport) -> Path:
    for reason, count in sorted(report.skipped.items()):
        click.echo(f"not exported: {count} ({reason})", err=True)
    click.echo(f"{report.entries} entries of {report.configs} layers")
    click.echo(str(report.path))
    return Path(report.path)


def import_db(
    path: Path, session_id: int | None, reason: str, facts: Mapping[str, str], library: str = "miopen"
) -> int:
    """Import a find db or perf db into a session, a new one unless given; prints the counts, last the session's id."""
    from tuna.db import sessions
    from tuna.db.engine import writing
    from tuna.exports.importer import import_db as read
    from tuna.exports.registry import exporter_of
    from tuna.libraries.miopen.formats import naming
    from tuna.libraries.registry import get_library

    engine = open_database()
    if session_id is None and (exporter := exporter_of(path)).importable:
        raise BadInput(f"A {exporter.title} goes into a session that is there.", hint="give it with --session-id")
    if session_id is None:
        arch, num_cu = naming.parse_name(path.name)
        known = {"arch": arch} | ({} if num_cu is None else {"num_cu": str(num_cu)}) | dict(facts)
        for name, flag in (("rocm_v", "--rocm_v"), ("miopen_v", "--miopen_v"), ("num_cu", "-n")):
            if name not in known:
                raise BadInput(f"{flag} is missing: a new session needs to know what the database was made with.")
        environment = get_library(library).environment_by_hand(known)
        with writing(engine) as connection:
            session_id, _ = sessions.create(connection, environment, reason)
    elif facts:
        raise BadInput("With --session_id the environment is the session's; leave the rest out.")
    report = read(engine, path, session_id)
    for why, count in sorted(report.skipped.items()):
        click.echo(f"not imported: {count} ({why})", err=True)
    click.echo(f"{report.rows} entries of {report.configs} layers ({report.new_configs} of them new)")
    click.echo(f"session {session_id}")
    return session_id


def merge_db(master: Path, target: Path, output: Path, *, keep_keys: bool) -> None:
    """Merge `target` into copies of `master`, a database or a folder of them, in `output`; prints each path."""
    from tuna.exports.merge import merge

    masters = sorted(path for path in master.iterdir() if path.is_file()) if master.is_dir() else [master]
    chosen = [path for path in masters if len(masters) == 1 or path.name == target.name]
    if not chosen:
        raise BadInput(f"{master} holds no {target.name} to merge into.")
    for path in chosen:
        place = output / path.name
        if place.exists() and place.samefile(path):
            raise BadInput(f"The result would replace {path}.", hint="name another folder with --output")
        report = merge(path, target, place, keep_keys=keep_keys)
        click.echo(
            f"{report.kept} kept, {report.replaced} replaced, {report.added} added, "
            f"{report.dropped} dropped with their problems, {report.unusable} without a time"
        )
        click.echo(str(place))
