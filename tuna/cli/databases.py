"""Commands about database files that are there already: import-db, merge-db, db-diff, check-db."""

from __future__ import annotations

from pathlib import Path

import click

from tuna.cli import options, transfer
from tuna.cli.console import print_json

_PATH = click.Path(path_type=Path)
_FILE = click.Path(path_type=Path, exists=True, dir_okay=False)


@click.command()
@click.argument("file", type=_FILE)
@click.option("--session-id", type=click.IntRange(min=1), help="Into this session; default: a new one.")
@click.option("--arch", help="Architecture; default: from the file's name.")
@click.option("--num-cu", type=click.IntRange(min=1), help="Compute units; default: from the file's name.")
@click.option("--rocm-version", help="ROCm that the database was made with.")
@click.option("--miopen-version", help="MIOpen that the database was made with.")
@click.option("-l", "--label", "reason", default="imported", show_default=True, help="Why: a short text.")
def import_db(
    file: Path,
    session_id: int | None,
    arch: str | None,
    num_cu: int | None,
    rocm_version: str | None,
    miopen_version: str | None,
    reason: str,
) -> None:
    """Import a find db or perf db of MIOpen's, packed with bzip2 or not, into a session."""
    given = {"arch": arch, "num_cu": num_cu, "rocm_v": rocm_version, "miopen_v": miopen_version}
    transfer.import_db(
        file, session_id, reason, {name: str(value) for name, value in given.items() if value is not None}
    )


@click.command()
@click.argument("master", type=_PATH)
@click.argument("target", type=_FILE)
@click.option("-d", "--directory", type=_PATH, required=True, help="Where the result goes.")
@click.option("--keep-keys", is_flag=True, help="Where both have a key, keep the master's other entries.")
def merge_db(master: Path, target: Path, directory: Path, keep_keys: bool) -> None:
    """Merge TARGET, whose entries win, into a copy of MASTER."""
    transfer.merge_db(master, target, directory, keep_keys=keep_keys)


@click.command()
@click.argument("a", type=_FILE)
@click.argument("b", type=_FILE)
@options.as_json
def db_diff(a: Path, b: Path, as_json: bool) -> int:
    """Say how database B differs from A: added, removed, changed, by solver and type. Exit 1 if it does."""
    from tuna.exports.diff import diff

    found = diff(a, b)
    if as_json:
        print_json(found.as_json())
    else:
        for line in found.lines():
            click.echo(line)
    return 1 if found.differs else 0


@click.command()
@click.argument("directory", type=click.Path(path_type=Path, exists=True, file_okay=False))
@click.option("--library", default="miopen", show_default=True, help="Whose solvers are known.")
@options.as_json
def check_db(directory: Path, library: str, as_json: bool) -> int:
    """Check a folder of databases by the rules of MIOpen's own test. Exit 1 if a rule is broken."""
    from dataclasses import asdict

    from tuna.cli.database import open_database
    from tuna.db import solvers
    from tuna.db.engine import reading
    from tuna.errors import BadInput
    from tuna.exports.check import check

    known: dict[str, bool] | None
    with reading(open_database()) as connection:
        try:
            known = {solver.name: solver.tunable for solver in solvers.list_solvers(connection, library)}
        except BadInput:
            known = None
            click.echo(f"The solvers of {library} are not stored: rules about them are left out.", err=True)
    faults = check(directory, known)
    if as_json:
        print_json([asdict(fault) | {"file": str(fault.file)} for fault in faults])
    else:
        for fault in faults:
            click.echo(f"{fault.file}: {fault.rule}: {fault.text}")
        click.echo(f"{len(faults)} faults" if faults else "no fault")
    return 1 if faults else 0
