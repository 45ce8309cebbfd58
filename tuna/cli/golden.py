"""`tuna golden`: numbered releases of results."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import click

from tuna import api
from tuna.cli import options
from tuna.cli.console import print_json, print_table, say
from tuna.cli.groups import Group
from tuna.common.messages import choices


class _Kind(click.ParamType[str]):
    """A kind of layer, of those that are installed."""

    name = "kind"

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> Any:
        if value not in api.KINDS.names():
            self.fail(
                f"unknown kind {value!r}; {choices(value, api.KINDS.names(), 'kinds')}.",
                param,
                ctx,
            )
        return value


KINDS = _Kind()
_NUMBER = options.GOLDEN
_version = click.argument("version", type=_NUMBER)
_library = click.option(
    "--library", help="Library of the version, where several have one of this number."
)


def _share(_: click.Context, parameter: click.Parameter, text: str | None) -> float | None:
    """A share such as 5% or 0.05, as a fraction."""
    if text is None:
        return None
    number, percent = text.strip().removesuffix("%"), text.strip().endswith("%")
    try:
        share = float(number) / (100 if percent else 1)
    except ValueError:
        share = math.nan
    if not 0 <= share < math.inf or (share > 1 and not percent):
        raise click.BadParameter(f"{text!r} is not a share; write 5% or 0.05.", param=parameter)
    return share


def _gate(command: Callable[..., int | None]) -> Callable[..., int | None]:
    gain = click.option(
        "--min-gain", callback=_share, help="Minimum drop of weighted time, such as 5%."
    )
    loss = click.option(
        "--max-regression",
        callback=_share,
        help="Maximum by which a layer may be slower, such as 5%; none may be missing.",
    )
    return loss(gain(command))


@dataclass(frozen=True)
class Accepted:
    """Results and versions that a build takes though it would rather not."""

    overwrite: bool = options.option(
        "Write into a version that exists, if it is still a draft.", "-o"
    )
    allow_imported: bool = options.option("Accept results that were imported and not measured.")
    allow_noisy: bool = options.option(
        "Accept results that were measured on a device that was not quiet."
    )


@click.group(cls=Group)
def golden() -> None:
    """Build, compare, promote and roll back numbered releases of results."""


@golden.command()
@_version
@click.option("--session-id", type=options.ID, help="Session whose results go in.")
@click.option("--base", type=_NUMBER, help="Version to start from.")
@click.option("--kind", type=KINDS, help="Only the session's results for layers of this kind.")
@options.collected(Accepted)
@_library
def build(version: int, base: int | None, wanted: Accepted, **chosen: Any) -> None:
    """Build a version from a base version, a session, or both; where both have a result the
    session's counts."""
    print_build(api.golden.build(version, base_version=base, **chosen, **asdict(wanted)))


def print_build(report: api.golden.BuildReport) -> None:
    """Print what a build made, and what to type next."""
    say(str(report))
    say(
        f"next: `tuna golden report {report.version}`, then `tuna golden promote {report.version}`",
        err=True,
    )


@golden.command(name="list")
@click.option("--library", help="Only versions of this library.")
@options.as_json
def list_versions(library: str | None, as_json: bool) -> None:
    """List the versions; the current one is marked."""
    found = api.golden.versions(library)
    if as_json:
        print_json(found)
    elif not found:
        say("No golden versions yet. Build one with: `tuna golden build VERSION --session-id ID`")
    else:
        columns = (
            *("library", "version", "", "state", "base", "entries", "built", "promoted"),
            *("by", "note"),
        )
        print_table(columns, map(_row, found), right=(1, 4, 5))


def _row(one: api.golden.Version) -> tuple[object, ...]:
    base = "-" if one.base_version is None else one.base_version
    built, promoted = (
        f"{at:%Y-%m-%d %H:%M}" if at else "-" for at in (one.created_at, one.promoted_at)
    )
    mark = "current" if one.current else ""
    facts = (one.library, one.version, mark, one.state.value, base, one.entries)
    return (*facts, built, promoted, one.promoted_by, one.note)


@golden.command()
@_version
@click.option("--against", type=_NUMBER, help="Version to compare with; default: the base.")
@click.option(
    "--session-id", type=options.ID, help="Compare what this session found with VERSION instead."
)
@_gate
@_library
@options.as_json
def report(
    version: int,
    against: int | None,
    session_id: int | None,
    library: str | None,
    as_json: bool,
    **limits: float | None,
) -> int:
    """Compare a version with its base by model and layer; exit code 1 if it violates a limit that
    is given.

    With --session-id a session is compared with VERSION, for the session's device model, before
    anything is built.
    """
    if against is not None and session_id is not None:
        raise click.UsageError(
            "With --session-id, VERSION is what is compared with: leave --against away."
        )
    if session_id is None:
        comparison = api.golden.report(version, against, library)
    else:
        comparison = api.golden.report_session(session_id, version, library)
    violations = api.golden.check_gate(comparison, **limits)
    if as_json:
        print_json(comparison.as_json() | {"violations": violations})
    else:
        for line in comparison.lines():
            say(line)
    for violation in violations:
        say(f"violated: {violation}", err=True)
    return 1 if violations else 0


@golden.command()
@_version
@click.option(
    "--allow-noisy",
    is_flag=True,
    help="Accept results that were measured on a device that was not quiet.",
)
@click.option("--note", default="", help="Reason, for `golden list` and `golden explain`.")
@_gate
@_library
def promote(version: int, library: str | None, **wishes: Any) -> None:
    """Release a draft, if it keeps the limits beside the current version (its base, where none is);
    then it is frozen."""
    found = api.golden.promote(version, library=library, **wishes)
    t = found.total
    beside = (
        ""
        if found.against is None
        else f" (against version {found.against}: {t.faster} faster, {t.slower} slower)"
    )
    say(f"golden version {version} of {found.library} is promoted{beside}")


@golden.command()
@options.library_argument
def rollback(library: str) -> None:
    """Withdraw the newest release of LIBRARY; the one before it is current again."""
    withdrawn, now = api.golden.rollback(library)
    after = f"version {now.version} is current again" if now else "no version is current"
    say(f"golden version {withdrawn.version} of {library} is withdrawn; {after}")


@golden.command()
@_version
@click.argument("key")
@click.option("--solver", help="Only the entries of this solver.")
@_library
@options.as_json
def explain(version: int, key: str, solver: str | None, library: str | None, as_json: bool) -> None:
    """Show where the entries of KEY come from, what speaks for them, and what other versions had.

    KEY is the number of an entry, or names a layer: config key, problem key, label or driver
    command. FILE:LINE is a line of a find db, a perf db in text, or a json export, of which the
    fastest solver's entry is shown, or --solver's.
    """
    file, _, line = key.rpartition(":")
    if line.isdecimal() and Path(file).is_file():
        found = api.golden.explain_line(version, Path(file), int(line), solver, library)
    else:
        found = api.golden.explain(version, key, solver, library)
    if as_json:
        print_json(found)
        return
    for one in found:
        for line in one.lines():
            say(line)
