"""`tuna query` and `tuna coverage`: what is known of which layers."""

from __future__ import annotations

import json
import sys
from collections.abc import Sequence
from dataclasses import asdict
from datetime import datetime
from operator import attrgetter

import click

from tuna import api
from tuna.api.documents import csv_lines
from tuna.cli import options
from tuna.cli.console import Column, fitted, print_json, print_table, say, terminal_width
from tuna.cli.report import marked_ms, noisy_times
from tuna.common import formats
from tuna.common.messages import counted
from tuna.errors import BadInput, LibraryMissing, NotFound
from tuna.results.result_rows import MAX_LIMIT, ResultFilter, moment
from tuna.vocabulary import PREDICTED

#: Maximum of layers without a need for trials that are named one by one
_MAX_KNOWN = 20
#: Maximum of layers named as the source of a prediction
_NEAREST = 3

_device = click.option("--device", help="Text in the name of the device.")
_of_library = click.option("--library", help="Only results of this library.")


def since(_context: click.Context, _param: click.Parameter, text: str | None) -> datetime | None:
    """Return the moment that an option names."""
    return None if text is None else moment(text)


@click.command()
@options.collected(
    ResultFilter,
    tag={"names": ["-t"]},
    shape={"metavar": "FIELD=N|TEXT"},
    session_id={"type": options.ID},
    since={"callback": since, "metavar": "TIME"},
    n_best={"type": options.COUNT},
    limit={"type": click.IntRange(1, MAX_LIMIT)},
)
@click.option(
    "--predict",
    metavar="DRIVER",
    help="Best configuration of this layer, predicted if it was never tuned.",
)
@click.option("--explain", is_flag=True, help="Show all that is known of each row, not a table.")
@options.as_json
@click.option("--csv", "as_csv", is_flag=True, help="Print CSV.")
def query(
    predict: str | None,
    explain: bool,
    as_json: bool,
    as_csv: bool,
    wanted: ResultFilter,
) -> None:
    """Print results of all sessions, golden versions and imported databases that meet all that is
    asked for.

    By layer in the order of its import, then by time. --json, --csv and --explain have the command
    that repeats each measurement.
    """
    if explain + as_json + as_csv > 1:
        raise BadInput("Choose one of --explain, --json and --csv.")
    if predict is not None:
        others = {**asdict(wanted), "explain": explain, "csv": as_csv, "limit": None}
        scope = {name: others.pop(name) for name in ("arch", "device", "library")}
        if unused := [f"--{name.replace('_', '-')}" for name, value in others.items() if value]:
            raise BadInput(f"--predict takes --arch, --device, --library, not {unused[0]}.")
        _print_best(*api.best([predict], **scope, predict=True), as_json=as_json)
        return
    rows = api.query(wanted, with_commands=explain or as_json or as_csv)
    if as_json:
        print_json(rows.rows)
    elif as_csv:
        sys.stdout.writelines(csv_lines(rows))
    elif explain:
        for row in rows:
            _explain(row)
    elif rows:
        _print_rows(rows)
    if not rows:
        say("No result meets all that is asked for.", err=True)
    if rows.more:
        say(
            f"These are the first {rows.limit} rows; there are more: --limit N; all are in `tuna"
            " export`.",
            err=True,
        )


@click.command()
@options.session_id
@click.option("-t", "--tag", help="Only layers that carry this tag.")
@options.as_json
@click.option("--csv", "as_csv", is_flag=True, help="Print CSV.")
def results(session_id: int, tag: str | None, as_json: bool, as_csv: bool) -> None:
    """List the fastest kernel of each layer of a session, with its params, spread, error and
    environment.

    Layers that needed no trial (--target-ms) are named with the known result.

    --json and --csv have all that is known, the command that repeats each measurement too.
    """
    if as_json and as_csv:
        raise BadInput("Choose one of --json and --csv.")
    rows = api.winners(session_id, tag, with_commands=as_json or as_csv)
    if as_json:
        print_json(rows.rows)
    elif as_csv:
        sys.stdout.writelines(csv_lines(rows))
    else:
        without = api.without_solver(session_id, tag)
        if rows or without:
            _print_rows(
                rows, with_params=True, without=[(layer.layer, layer.reason) for layer in without]
            )
        measured = {row.config_key for row in rows}
        known = [met for met in api.targets_met(session_id, tag) if met.config_key not in measured]
        for met in known[:_MAX_KNOWN]:
            say(f"{met.layer}: needed no trial, target met by {met.by}")
        if len(known) > _MAX_KNOWN:
            say(
                f"and {counted(len(known) - _MAX_KNOWN, 'more layer')}: `tuna report --session-id"
                f" {session_id}`"
            )
        if not rows and not known and not without:
            say("There are no results in this session yet.", err=True)


def _print_best(best: api.BestResult, *, as_json: bool) -> None:
    """Print a result, or a prediction with its interval."""
    if as_json:
        print_json(best)
        return
    known = best.result
    if known is None:
        say("This layer has no result, and no similar layer to predict it from.", err=True)
        return
    times = [known["time_ms"], known["low_ms"], known["high_ms"]]
    shown = ["" if time_ms is None else f"{time_ms:.3g}" for time_ms in times]
    params = _readable_text(known["library"], known["params"])
    print_table(
        ("class", "library", "solver", "params", "ms", "from", "to"),
        [(str(best.cover), known["library"], known["solver"], params, *shown)],
        (4, 5, 6),
    )
    if best.cover == PREDICTED:
        say(
            f"{known['predictor']} predicts it from {', '.join(known['nearest'][:_NEAREST])}. It"
            " was not measured: no export or golden version has it."
        )


def _explain(row: api.ResultRow) -> None:
    document = row.as_json()
    command = document.pop("command")
    say(f"{document.pop('layer')}")
    for name, value in document.items():
        if value not in (None, "", {}):
            say(
                f"  {name.replace('_', ' '):<16}"
                f" {json.dumps(value) if isinstance(value, dict) else value}"
            )
    say(f"  {command}\n", wrap=False)


def _print_rows(
    rows: api.ResultRows, *, with_params: bool = False, without: Sequence[tuple[str, str]] = ()
) -> None:
    """`without`: layers without a solver, each with the reason."""
    decimals = formats.decimals_for(row.time_ms for row in rows)
    columns: list[Column[api.ResultRow]] = [
        Column("layer", lambda row: row.layer),
        Column("solver", lambda row: row.solver),
        Column("ms", lambda row: marked_ms(row.time_ms, decimals, noisy=row.noisy), right=True),
        Column("±", lambda row: formats.spread(row.spread), 2, right=True),
        *([Column("params", _readable, 2)] if with_params else []),
        *([Column("marks", attrgetter("marks"), 1)] if any(row.marks for row in rows) else []),
        Column("error", _error, 5, right=True),
        Column("arch", lambda row: row.arch, 4),
        Column("environment", lambda row: row.environment[:8], 7),
        Column("from", _origin, 3),
        Column("device", lambda row: row.device, 8),
        Column("date", lambda row: f"{row.measured_at:%Y-%m-%d}" if row.measured_at else "", 6),
    ]
    print_table(*fitted(columns, rows.rows, terminal_width(), without))
    if noisy := sum(row.noisy for row in rows):
        say(noisy_times(noisy))


def _readable(row: api.ResultRow) -> str:
    return _readable_text(row.library, row.params)


def _readable_text(library: str, params: str) -> str:
    """The params in one line, as the library shows them; as they are where it is not installed."""
    try:
        return " ".join(api.get_library(library).params.readable(params).split())
    except (NotFound, LibraryMissing):
        return params


def _error(row: api.ResultRow) -> str:
    return "" if row.max_error is None else f"{row.max_error:.0e}"


def _origin(row: api.ResultRow) -> str:
    if row.golden is not None:
        return f"golden {row.golden}"
    return f"session {row.session_id}{' (import)' if row.imported_from else ''}"


@click.command()
@click.argument("name")
@click.option(
    "--arch", help="Architecture, such as gfx90a. Default: the only one that was tuned for."
)
@_device
@_of_library
@options.as_json
def coverage(
    name: str, arch: str | None, device: str | None, library: str | None, as_json: bool
) -> None:
    """Say how much of the model, network or tag NAME has results on an architecture: exact, near or
    none.

    Near: a layer that differs in sizes alone has one. Layers count as often as the model or network
    has them.
    """
    found = api.coverage(name, arch, device=device, library=library)
    if as_json:
        print_json(found)
        return
    _print_coverage(found)


def _print_coverage(coverage: api.Coverage) -> None:
    rows = [
        (
            cover,
            len(coverage.of(cover)),
            formats.percent(coverage.shares[cover]),
            formats.percent(coverage.work_shares[cover]),
        )
        for cover in api.Cover
    ]
    print_table(
        ("result", "layers", "of weight", "of FLOPs"),
        rows,
        (1, 2, 3),
        title=f"{coverage.subject} on {coverage.arch}",
    )
    lacking = [layer for layer in coverage.layers if layer.cover is not api.Cover.EXACT]
    if lacking:
        print_table(
            ("without a result", "weight", "near"),
            [(covered.layer, covered.weight, covered.near or "-") for covered in lacking],
            (1,),
        )
