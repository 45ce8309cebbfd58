"""Databases of kernel libraries: exported, imported, merged, compared, checked."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from functools import partial
from pathlib import Path

from tuna import exports
from tuna.api.opened import on_connection
from tuna.db import sessions, solvers
from tuna.db.database import open_database
from tuna.db.engine import reading
from tuna.errors import BadInput
from tuna.exports.database_files import MergeReport, check, diff, merge_all
from tuna.exports.importer import import_db
from tuna.exports.intake import ImportReport
from tuna.exports.registry import exporter_of
from tuna.exports.write import kernels_of
from tuna.libraries.abilities import environment_of
from tuna.libraries.exporter import CheckFacts, Findings
from tuna.libraries.imported_records import ImportedResult
from tuna.libraries.registry import get_library

export = on_connection(exports.export)
export_golden = on_connection(exports.export_golden)
compare_databases = diff


@dataclass(frozen=True)
class MergedDatabase:
    """A file that `merge_databases` wrote, and where its entries come from."""

    path: Path
    reports: Mapping[Path, MergeReport]  #: report of the merge by the file that was merged


def forms_of(library: str) -> list[str]:
    """The forms of export that suit a library's results: its own, and JSON."""
    return [*(one.form for one in get_library(library).exporters), "json"]


def import_database(
    path: Path,
    session_id: int | None,
    reason: str,
    facts: Mapping[str, str],
    library: str = "miopen",
    target: str = "",
) -> ImportReport:
    """Import a database file into a session; for a find db or perf db into a new one unless
    `session_id` is given.

    `facts` describe the new session's environment, as `environment_of` takes them, and complete
    those in the file's name. `target`: that of the records to take, where it is not the session's
    to the letter. Raises BadInput for an invalid file, or facts that are
    missing or not expected.
    """
    engine = open_database()
    exporter = exporter_of(path)
    if session_id is None and exporter.imports is ImportedResult:
        raise BadInput(
            f"A {exporter.title} can be imported into an existing session only.",
            hint="give it with --session-id",
        )
    if session_id is None:
        arch, num_cu = exporter.made_for(path.name)
        known = {"arch": arch} | ({} if num_cu is None else {"num_cu": str(num_cu)}) | dict(facts)
        for name, flag in (
            ("rocm_v", "--rocm-version"),
            ("miopen_v", "--miopen-version"),
            ("num_cu", "--num-cu"),
        ):
            if name not in known:
                raise BadInput(
                    f"{flag} is missing: a new session needs to know what the database was made"
                    " with."
                )
        environment = environment_of(get_library(library), known)
        return import_db(
            engine, path, partial(sessions.create, environment=environment, reason=reason)
        )
    if facts:
        raise BadInput("With --session-id the environment is the session's; leave the rest out.")
    return import_db(engine, path, session_id, target)


def merge_databases(
    master: Path,
    *targets: Path,
    output: Path,
    keep_keys: bool = False,
    form: str | None = None,
) -> list[MergedDatabase]:
    """Merge databases, of which the later win, into copies of `master`, a database or a folder of
    them, in `output`. Raises BadInput."""
    for path in (master, *targets):
        if not path.exists():
            raise BadInput(f"{path} cannot be read: No such file or directory.")
    masters = (
        sorted(path for path in master.iterdir() if path.is_file()) if master.is_dir() else [master]
    )
    chosen = [path for path in masters if len(masters) == 1 or path.name == targets[0].name]
    if not chosen:
        raise BadInput(f"{master} holds no {targets[0].name} to merge into.")
    merged = []
    for path in chosen:
        place = output / path.name
        for read in (path, *targets):
            if place.exists() and place.samefile(read):
                raise BadInput(
                    f"The result would replace {read}.", hint="name another folder with --directory"
                )
        reports = merge_all([path, *targets], place, keep_keys=keep_keys, form=form)
        merged.append(MergedDatabase(place, reports))
    return merged


def check_databases(directory: Path, library: str = "miopen") -> Findings:
    """Return the faults of the databases in a folder, by the rules of their forms."""
    known: dict[str, bool] | None
    with reading(open_database()) as connection:
        try:
            known = {
                solver.name: solver.tunable for solver in solvers.list_solvers(connection, library)
            }
        except BadInput:
            known = None
        return check(directory, CheckFacts(known, partial(kernels_of, connection, library)))
