"""Commands that prepare a session: environment, layers, solvers, applicability, jobs."""

from __future__ import annotations

from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING

import click

from tuna.cli import actions, options, transfer
from tuna.cli.console import print_table

if TYPE_CHECKING:
    from tuna.db.solvers import StoredSolver


@click.command()
@options.library_argument
@click.option("-l", "--label", "reason", required=True, help="Why: a short text.")
def init_session(library: str, reason: str) -> None:
    """Start a tuning effort of LIBRARY in this machine's environment; the same effort is found again."""
    actions.init_session(library, reason)


@click.command()
@click.argument("file", type=click.Path(path_type=Path))
@click.option("-t", "--tag", required=True, help="Name for this set of layers.")
@click.option("--strict", is_flag=True, help="Import nothing if any line is rejected.")
def import_configs(file: Path, tag: str, strict: bool) -> None:
    """Import layers from FILE, one MIOpenDriver command a line."""
    transfer.import_configs(file, tag, strict=strict)


@click.command()
@click.option("-t", "--tag", required=True, help="The set of layers.")
@options.as_json
def configs(tag: str, as_json: bool) -> None:
    """List the layers that carry a tag; with --json one object a line, under MIOpen's field names."""
    import json

    from tuna.cli.database import open_database
    from tuna.db import configs as stored
    from tuna.db.engine import reading

    with reading(open_database()) as connection:
        found = list(stored.tagged(connection, tag))
    if as_json:
        for config in found:
            click.echo(json.dumps(config.to_json()))
        return
    print_table("", ("layer", "GFLOP"), [(config.label, f"{config.flops / 1e9:.3f}") for config in found], right=(1,))


@click.command()
@options.library_argument
def update_solvers(library: str) -> None:
    """Store the solvers that LIBRARY has now."""
    actions.update_solvers(library)


@click.command()
@options.library_argument
@click.option("--options", "show_options", is_flag=True, help="List the options of its jobs instead.")
@options.as_json
def solvers(library: str, show_options: bool, as_json: bool) -> None:
    """List the stored solvers of LIBRARY, or what `load-jobs --option` takes."""
    from tuna.cli.console import print_json

    if show_options:
        _print_options(library, as_json)
        return
    found = actions.list_solvers(library)
    if as_json:
        print_json([asdict(solver) for solver in found])
        return
    print_solvers(found)


@click.command()
@options.session_id
@click.option("-t", "--tag", help="Only layers that carry this tag.")
def applicability(session_id: int, tag: str | None) -> None:
    """Work out which solvers can run which layers in a session."""
    actions.update_applicability(session_id, tag)


@click.command()
@options.session_id
@click.option("-t", "--tag", help="Only layers that carry this tag; default: all of the session.")
@click.option("--steps", help="Comma-separated steps; default: all of the library's.")
@click.option("-s", "--solvers", help="Comma-separated solvers; default: every applicable one.")
@click.option("-l", "--label", "reason", default="tuning", show_default=True, help="Why: a short text.")
@click.option("--candidates", type=click.IntRange(min=1), help="Candidates to try for each layer and solver.")
@click.option("--option", "pairs", multiple=True, metavar="NAME=VALUE", help="An option of the library's.")
def load_jobs(
    session_id: int,
    tag: str | None,
    steps: str | None,
    solvers: str | None,
    reason: str,
    candidates: int | None,
    pairs: tuple[str, ...],
) -> None:
    """Make the jobs of a session: one for each layer and applicable solver that has none yet."""
    actions.load_jobs(
        session_id,
        tag=tag,
        steps=options.split(steps),
        reason=reason,
        solvers=options.split(solvers),
        options=options.job_options(pairs, candidates),
    )


def _print_options(library: str, as_json: bool) -> None:
    from tuna.cli.console import print_json
    from tuna.libraries.options import describe
    from tuna.libraries.registry import get_library

    names = ("option", "type", "default", "meaning")
    rows = describe(get_library(library).options)
    if as_json:
        print_json([dict(zip(names, row, strict=True)) for row in rows])
    elif rows:
        print_table("", names, rows)
    else:
        click.echo(f"{library} has no job options.")


def print_solvers(found: list[StoredSolver]) -> None:
    """A table of solvers."""
    rows = [
        ("-" if s.number is None else s.number, s.name, ",".join(s.kinds), _yes(s.tunable), _yes(s.dynamic))
        for s in found
    ]
    print_table("", ("id", "solver", "kinds", "tunable", "dynamic"), rows, right=(0,))


def _yes(value: bool) -> str:
    return "yes" if value else "no"
