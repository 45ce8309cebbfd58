"""`tuna session`: sessions as a whole: what they take, archives, deletion."""

from __future__ import annotations

import sys
from collections import Counter
from collections.abc import Mapping, Sequence
from typing import Any

import click

from tuna import api
from tuna.api.documents import size_document
from tuna.cli import options
from tuna.cli.console import Column, ProgressView, print_json, print_list, say
from tuna.cli.groups import Group
from tuna.cli.show import option_texts, searches
from tuna.common.formats import duration, size
from tuna.common.messages import counted
from tuna.errors import BadInput

#: Maximum of searches whose warm start is shown one by one
_SHOWN = 5
#: Words for the origin of a search that others learn from
_ORIGINS = {
    "session": "of the same layer in other sessions",
    "config": "of other layers",
    "device": "in other environments",
    "prior": "trained predictors",
}
_ID = click.argument("session_id", metavar="ID", type=options.ID)


@click.group(cls=Group)
def session() -> None:
    """List, archive, restore, prune, delete sessions; options."""


@session.command("list")
@options.as_json
def list_sessions(as_json: bool) -> None:
    """List sessions with their state, counts, and what they take."""
    found = api.list_sessions()
    if as_json:
        print_json(found)
        return
    columns: list[Column[api.SessionSize]] = [
        Column("id", lambda one: str(one.id), right=True),
        Column("library", lambda one: one.library),
        Column("reason", lambda one: one.reason, 2),
        Column("state", lambda one: one.state),
        Column("jobs", lambda one: str(sum(one.jobs.values())), 1, right=True),
        Column("trials", lambda one: str(one.trials), 3, right=True),
        Column("size", lambda one: size(one.trial_bytes), 5, right=True),
        Column("results", lambda one: str(one.results), 4, right=True),
        Column("artifacts", lambda one: size(one.artifact_bytes), 6, right=True),
    ]
    none = "No sessions yet. Start one with: `tuna init-session LIBRARY -l REASON`"
    print_list(columns, found, none)


@session.command()
@_ID
@options.as_json
def show(session_id: int, as_json: bool) -> None:
    """Show one session: its state, its jobs, and what its trials and artifacts take."""
    (info,) = api.list_sessions(session_id)
    if as_json:
        print_json(size_document(info))
        return
    outlook = api.outlook(session_id)
    jobs = ", ".join(f"{count} {state}" for state, count in sorted(info.jobs.items()))
    golden = ", ".join(map(str, info.golden))
    for name, text in (
        ("session", f"{info.id} ({info.library}: {info.reason}), {info.state}"),
        ("uuid", info.uuid),
        ("environment", f"{info.environment}, {info.arch}"),
        ("created", info.created_at.isoformat(timespec="seconds")),
        ("jobs", f"{sum(info.jobs.values())}{f' ({jobs})' if jobs else ''}"),
        *(("searches", text) for text in [searches(info.searches)] if text),
        *(("warm start", text) for text in _warm_lines(api.warm_starts(session_id))),
        ("trials", f"{info.trials}, {size(info.trial_bytes)}"),
        (
            "results",
            (
                f"{info.results}, with {counted(info.artifacts, 'artifact')} of"
                f" {size(info.artifact_bytes)}"
            ),
        ),
        ("golden", f"versions {golden}" if golden else "no version has results of it"),
        *option_texts(info.options, outlook).items(),
        *_outlook_lines(outlook),
    ):
        say(f"{name:12} {text}")


class _Place(click.ParamType[str]):
    """A URL, or a file: one that is there, or one that can be written."""

    name = "text"

    def __init__(self, file: click.Path) -> None:
        self._file = file

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> str:
        return value if "://" in value else str(self._file.convert(value, param, ctx))


_ARCHIVE = _Place(click.Path(exists=True, dir_okay=False))


@session.command()
@_ID
@click.argument("place", metavar="FILE|URL", type=_Place(options.OUTPUT_FILE))
def archive(session_id: int, place: str) -> None:
    """Write a session into FILE, or in parts to a URL (s3://bucket/one), for another Tuna to
    restore.

    With it go its layers and their tags, jobs, attempts, trials, results, and the artifacts of the
    winners. Artifacts of jobs that have not ended, golden versions, and models stay here. Parts
    that are at the URL are not sent again: the same command goes on.
    """
    with ProgressView("archive") as view:
        header, took = api.archive_session(session_id, place, view.count("archived"))
    there = took.size_bytes - took.sent_bytes
    say(
        f"session {session_id} ({header.library}: {header.reason}), {counted(header.jobs, 'job')}:"
        f" {place}, {size(took.size_bytes)}{f', {size(there)} of it were there' if there else ''}"
    )


@session.command()
@click.argument("place", metavar="FILE|URL", type=_ARCHIVE)
@click.option(
    "--reason",
    help="New reason of the session, where one of its environment has the old one here.",
)
def restore(place: str, reason: str | None) -> None:
    """Restore the session that FILE or the URL holds.

    Its artifacts are code that will be exported: restore only what you trust.
    """
    with ProgressView("restore") as view:
        found = api.restore_session(place, reason, view.count("restored"))
    new = (
        f"; new ids in {', '.join(found.new_ids)}, where the old ones are taken"
        if found.new_ids
        else ""
    )
    say(
        f"session {found.session_id} ({found.library}: {found.reason}) restored:"
        f" {counted(found.jobs, 'job')}{new}"
    )


@session.command()
@_ID
@click.option(
    "--keep",
    type=options.COUNT,
    default=20,
    show_default=True,
    help="Number of trials kept for each layer and solver, the fastest.",
)
@click.option(
    "--archived",
    "place",
    metavar="FILE|URL",
    type=_ARCHIVE,
    required=True,
    help="Its archive, which is read to the end first.",
)
def prune(session_id: int, keep: int, place: str) -> None:
    """Delete trials of a session whose jobs have ended, once its archive has all of it.

    Those of results stay, the fastest, and one failure of each cause.
    """
    done = api.prune_session(session_id, keep, place)
    say(f"session {session_id}: {counted(done.deleted, 'trial')} deleted, {done.kept} kept")


@session.command()
@_ID
@click.option("--cancel", "cancels", is_flag=True, help="Cancel the session's jobs first.")
@click.option("--yes", is_flag=True, help="Do not ask.")
def delete(session_id: int, cancels: bool, yes: bool) -> None:
    """Delete a session: its jobs, trials and results, and the artifacts that nothing else needs.

    Layers, tags and solvers stay, and golden versions keep what they need. The only way back is
    from an archive.
    """
    (info,) = api.list_sessions(session_id)
    api.check_deletion(session_id, cancels=cancels)
    what = f"session {session_id} ({info.library}: {info.reason})"
    if not yes:
        if not sys.stdin.isatty():
            raise BadInput(
                f"Whether to delete {what} is asked on a terminal only.", hint="add --yes"
            )
        has = f"{counted(sum(info.jobs.values()), 'job')} and {counted(info.results, 'result')}"
        click.confirm(f"Delete {what} with {has}?", abort=True)
    if cancels:
        api.cancel(session_id)
    with ProgressView("delete") as view:
        done, left = api.delete_session(session_id, view.count("deleted"))
    kernels = counted(done.kernels, "artifact")
    say(
        f"{what} deleted: {counted(done.jobs, 'job')}, {counted(done.results, 'result')}, {kernels}"
    )
    if done.golden:
        say(
            "Its row stays, as the provenance of results of golden version"
            f" {', '.join(done.golden)}."
        )
    if left:
        say(f"Some of its artifacts stay in the store: {left}", err=True)


def _warm_lines(found: Sequence[api.WarmStart]) -> list[str]:
    """Return the sources of warm starts: all in one line, then the first few."""
    if not found:
        return []
    counts = Counter(one.origin for start in found for one in start.siblings)
    from_ = ", ".join(
        f"{counts[origin]} {words}" for origin, words in _ORIGINS.items() if counts[origin]
    )
    lines = [f"{counted(len(found), 'search', 'searches')} learned from others: {from_}"]
    for start in found[:_SHOWN]:
        named = "; ".join(
            f"{one.label}{' (noisy)' if one.noisy else ''}" for one in start.siblings[:2]
        )
        more = f"; {len(start.siblings) - 2} more" if len(start.siblings) > 2 else ""
        lines.append(f"{start.layer}, {start.solver}: {named}{more}")
    hidden = len(found) - _SHOWN
    return lines + ([f"{hidden} more: --json has them all"] if hidden > 0 else [])


@session.command("set")
@_ID
@options.session_options
def set_session(session_id: int, session_options: Mapping[str, str]) -> None:
    """Set options of a session; a coordinator that serves it knows within a second."""
    if not session_options:
        names = " or ".join(f"--{name}" for name in api.SessionOptions.model_fields)
        raise BadInput("There is nothing to set.", hint=f"give {names}")
    changed = api.set_session(session_id, **session_options)
    for name in session_options:
        text = changed.text(name)
        say(f"session {session_id}: {f'no {name}' if text == 'none' else f'{name} {text}'}")


def _outlook_lines(one: api.Outlook | None) -> list[tuple[str, str]]:
    """Return the jobs that are left, and the error of the prediction."""
    lines: list[tuple[str, str]] = []
    if one is not None and one.unfinished and one.eta_s is not None:
        left = counted(one.unfinished, "job")
        lines.append(("left", f"{left}, {duration(one.eta_s)} with the live workers"))
    if one is not None and one.prediction_error is not None:
        off = f"{one.prediction_error:.0%} off, the median over the stages that are left"
        lines.append(("prediction", off))
    return lines
