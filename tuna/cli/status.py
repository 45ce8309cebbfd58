"""`tuna status`, also as a live view, and `tuna metrics`."""

from __future__ import annotations

import contextlib
import time
from collections import Counter

import click
from rich.console import Console, Group, RenderableType
from rich.live import Live
from rich.text import Text

from tuna import api
from tuna.api.documents import json_text, overview_documents, snapshot_document
from tuna.cli import options, show
from tuna.cli.console import Column, duration, fitted, print_json, say, table
from tuna.common.messages import COMMAND_CHARS, counted, last_line, one_line
from tuna.common.signals import INTERRUPTS
from tuna.vocabulary import State

#: Maximum of sessions that fit a screen; those with work to do come first, then the newest
_MAX_SESSIONS = 12
_MAX_WORKERS = 16
#: Minimum of columns of the jobs by state, which are wrapped
_NARROWEST = 20
#: Maximum of characters of a worker's host, so that the table fits 80 columns; `tuna workers` shows
#: them all
_HOST_CHARS = 30
_DASH = "–"


@click.command()
@click.option("--session-id", type=options.ID, help="Only this session, with its failures.")
@click.option("--watch", "stays", is_flag=True, help="Keep showing the progress until Ctrl-C.")
@click.option(
    "--interval",
    type=click.FloatRange(min=0.2),
    default=2.0,
    show_default=True,
    help="Seconds between two updates.",
)
@options.as_json
def status(session_id: int | None, stays: bool, interval: float, as_json: bool) -> None:
    """Show sessions, their jobs by state, and why jobs failed."""
    if stays:
        watch(session_id, interval, as_json=as_json)
        return
    overviews = api.status(session_id, commands=as_json or session_id is not None)
    if as_json:
        print_json(overview_documents(overviews))
    else:
        show.sessions(overviews, details=session_id is not None)
        # or there is nothing that workers could leave undone
        if in_flight := [session.session_id for session in overviews if session.in_flight]:
            show.aside(api.workers_aside())
            show.waits(api.waits(in_flight))
            if number := api.dropped_messages():
                strange = f"{counted(number, 'message')} on the queues came from no coordinator"
                say(f"{strange}, and were dropped: see the workers' log", err=True)
    if letters := api.undrained_reports():
        reports = counted(letters, "report of a worker", "reports of workers")
        say(
            f"{reports} could not be drained: see the table dead_letter (docs/operations.md,"
            " Failures)",
            err=True,
        )


@click.command()
@click.option("--listen", default="127.0.0.1:9464", show_default=True, metavar="HOST:PORT")
def metrics(listen: str) -> None:
    """Answer Prometheus at http://HOST:PORT/metrics, until Ctrl-C."""
    api.serve_metrics(listen, lambda url: say(f"metrics at {url}", err=True))


def watch(session_id: int | None, interval_s: float, *, as_json: bool) -> None:
    """Refresh every `interval_s` seconds until Ctrl-C."""
    watcher = api.watcher(session_id)
    console = Console()
    with contextlib.suppress(*INTERRUPTS):
        if as_json or not console.is_terminal:
            while True:
                snapshot = watcher.look(interval_s)
                for text in (
                    [json_text(snapshot_document(snapshot))] if as_json else lines(snapshot)
                ):
                    say(text)
                time.sleep(interval_s)
        with Live(console=console, auto_refresh=False) as live:
            while True:
                snapshot = watcher.look()
                live.update(view(snapshot, console.width, console.height), refresh=True)
                time.sleep(0.0 if snapshot.read_share < 1.0 else interval_s)


def lines(snapshot: api.LiveSnapshot) -> list[str]:
    """A line for each session."""
    workers = _DASH if snapshot.workers is None else str(len(snapshot.workers))
    return [
        f"{snapshot.at:%H:%M:%S} session {session.overview.session_id}: {_jobs(session)};"
        f" {session.rate_per_s:.2f} results/s, ETA {_eta(session)}, efficiency"
        f" {_percent(_efficiency(session))}, idle {_percent(_idle(session))}, workers {workers}"
        + "".join(f"; {failure.attempts} {failure.cause}" for failure in session.overview.failures)
        + (f"; waiting for: {one_line(session.waits_for)}" if session.waits_for else "")
        for session in _chosen(snapshot)
    ] or [f"{snapshot.at:%H:%M:%S} no sessions yet"]


def view(snapshot: api.LiveSnapshot, width: int = 160, height: int = 50) -> RenderableType:
    """All of it for a terminal; of what does not fit, the lesser columns and the last rows are left
    out."""
    workers = _workers(snapshot, width, min(_MAX_WORKERS, max(3, height // 4)))
    room = height - _lines(workers, width) - 1
    sessions = (_sessions(snapshot, width, most) for most in range(_MAX_SESSIONS, 0, -1))
    first = next(sessions)
    while _lines(first, width) > room and (smaller := next(sessions, None)) is not None:
        first = smaller
    parts: list[RenderableType] = [first, workers]
    aside = [f"{row.name} is aside: {row.aside}" for row in snapshot.workers or () if row.aside]
    parts += [Text(one_line(text), overflow="fold") for text in aside]
    parts += [
        Text(show.wait(session.overview.session_id, session.waits_for), overflow="fold")
        for session in _chosen(snapshot)
        if session.waits_for
    ]
    parts += [
        Text(text, overflow="fold") for session in _chosen(snapshot) for text in _failures(session)
    ]
    if snapshot.read_share < 1.0:
        parts.append(Text(f"reading the history: {100 * snapshot.read_share:.0f} %"))
    parts.append(Text(f"{snapshot.at:%Y-%m-%d %H:%M:%S} UTC, Ctrl-C to leave", style="dim"))
    return Group(*parts)


def _lines(part: RenderableType, width: int) -> int:
    return len(Console(width=width).render_lines(part))


def _chosen(snapshot: api.LiveSnapshot, most: int = _MAX_SESSIONS) -> list[api.LiveSession]:
    first = sorted(
        snapshot.sessions,
        key=lambda session: (not session.unfinished, -session.overview.session_id),
    )
    return sorted(
        first[: min(most, _MAX_SESSIONS)], key=lambda session: session.overview.session_id
    )


def _sessions(snapshot: api.LiveSnapshot, width: int, most: int) -> RenderableType:
    chosen = _chosen(snapshot, most)
    columns: list[Column[api.LiveSession]] = [
        Column("session", lambda one: str(one.overview.session_id), right=True),
        Column("done", lambda one: _percent(_done(one)), right=True),
        Column("results/s", lambda one: f"{one.rate_per_s:.2f}", right=True),
        Column("ETA", _eta, right=True),
        Column("jobs by state", _jobs, 1, most=_NARROWEST),
        Column("library", lambda one: f"{one.overview.library} {one.overview.arch}", 2),
        Column("reason", lambda one: one.overview.reason, 3),
        Column("efficiency", lambda one: _percent(_efficiency(one)), 4, right=True),
        Column("device idle", lambda one: _percent(_idle(one)), 5, right=True),
    ]
    left = len(snapshot.sessions) - len(chosen)
    title = f"{counted(len(snapshot.sessions), 'session')}, {left} of them not shown"
    return table(title if left else "", *fitted(columns, chosen, width), width)


def _done(session: api.LiveSession) -> float | None:
    """The share of the jobs that are done, of those that are not canceled."""
    jobs = session.overview.jobs
    wanted = (
        sum(jobs.values()) - jobs.get(State.CANCELED.value, 0) + session.overview.searches.total
    )
    return (wanted - session.unfinished) / wanted if wanted else None


def _workers(snapshot: api.LiveSnapshot, width: int, most: int) -> RenderableType:
    if snapshot.workers is None:
        return Text(f"workers: {_DASH} (Redis does not answer)")
    if not snapshot.workers:
        return Text("workers: none")
    roles = Counter(worker.role for worker in snapshot.workers)
    columns: list[Column[api.WorkerStatus]] = [
        Column("worker", lambda one: f"{one_line(one.host, _HOST_CHARS)}:{one.pid}"),
        Column("role", lambda one: one.role),
        Column("device", lambda one: one.device or _DASH, 1),
        Column("current jobs", lambda one: str(len(one.job_ids)), right=True),
        Column("done", lambda one: str(one.done), right=True),
    ]
    title = "workers: " + ", ".join(f"{count} {role}" for role, count in sorted(roles.items()))
    return table(title, *fitted(columns, snapshot.workers[:most], width), width)


def _failures(session: api.LiveSession) -> list[str]:
    number, fault = session.overview.session_id, session.overview.fault
    texts = [f"session {number} is set aside: {one_line(fault)}"] if fault else []
    for failure in session.overview.failures:
        last = last_line(failure.output_tail, 200)
        texts.append(
            f"session {session.overview.session_id}: {failure.attempts} {failure.cause}: {last}"
        )
        if failure.reproduce:
            texts.append(f"  reproduce: {one_line(failure.reproduce, COMMAND_CHARS)}")
    return texts


def _jobs(session: api.LiveSession) -> str:
    searches = show.searches(session.overview.searches)
    parts = [show.jobs_text(session.overview), *([f"searches {searches}"] if searches else [])]
    return "; ".join(filter(None, parts)) or "no jobs"


def _percent(share: float | None) -> str:
    return _DASH if share is None else f"{100 * share:.0f} %"


def _efficiency(session: api.LiveSession) -> float | None:
    return session.totals.efficiency if session.totals else None


def _idle(session: api.LiveSession) -> float | None:
    return session.totals.idle_share if session.totals else None


def _eta(session: api.LiveSession) -> str:
    return _DASH if session.eta_s is None else duration(session.eta_s)
