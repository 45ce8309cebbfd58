"""`tuna status --watch`: a live view on a terminal, a line (or JSON object) per interval elsewhere."""

from __future__ import annotations

import contextlib
import json
import time
from collections import Counter
from dataclasses import asdict
from typing import TYPE_CHECKING, Any

import click

from tuna import api

if TYPE_CHECKING:
    from rich.console import RenderableType
    from rich.table import Table
    from rich.text import Text

    from tuna.reports.status import LiveSession, Snapshot

#: More sessions than this do not fit a screen; those with work to do come first, then the newest.
_MOST_SESSIONS = 12
_MOST_WORKERS = 16
_DASH = "–"


def watch(session_id: int | None, interval_s: float, *, as_json: bool) -> None:
    """Refresh every `interval_s` seconds until Ctrl-C."""
    from rich.console import Console
    from rich.live import Live

    watcher = api.watcher(session_id)
    console = Console()
    with contextlib.suppress(KeyboardInterrupt):
        if as_json or not console.is_terminal:
            while True:
                snapshot = watcher.look(interval_s)
                for text in [json.dumps(_document(snapshot))] if as_json else lines(snapshot):
                    click.echo(text)
                time.sleep(interval_s)
        with Live(console=console, auto_refresh=False) as live:
            while True:
                snapshot = watcher.look()
                live.update(view(snapshot), refresh=True)
                time.sleep(0.0 if snapshot.read_share < 1.0 else interval_s)


def lines(snapshot: Snapshot) -> list[str]:
    """A line for each session."""
    workers = _DASH if snapshot.workers is None else str(len(snapshot.workers))
    return [
        f"{snapshot.at:%H:%M:%S} session {session.overview.session_id}: {_jobs(session)}; {session.rate_per_s:.2f} results/s, "
        f"ETA {_eta(session)}, efficiency {_percent(_efficiency(session))}, "
        f"idle {_percent(_idle(session))}, workers {workers}"
        + "".join(f"; {failure.attempts} {failure.cause}" for failure in session.overview.failures)
        for session in _chosen(snapshot)
    ] or [f"{snapshot.at:%H:%M:%S} no sessions yet"]


def view(snapshot: Snapshot) -> RenderableType:
    """All of it for a terminal."""
    from rich.console import Group
    from rich.text import Text

    parts: list[RenderableType] = [_sessions(snapshot), _workers(snapshot)]
    parts += [Text(text, overflow="fold") for session in _chosen(snapshot) for text in _failures(session)]
    if snapshot.read_share < 1.0:
        parts.append(Text(f"reading the history: {100 * snapshot.read_share:.0f} %"))
    parts.append(Text(f"{snapshot.at:%Y-%m-%d %H:%M:%S} UTC, Ctrl-C to leave", style="dim"))
    return Group(*parts)


def _chosen(snapshot: Snapshot) -> list[LiveSession]:
    first = sorted(snapshot.sessions, key=lambda session: (not session.unfinished, -session.overview.session_id))[
        :_MOST_SESSIONS
    ]
    return sorted(first, key=lambda session: session.overview.session_id)


def _table(*columns: str, right: tuple[int, ...] = ()) -> Table:
    from rich import box
    from rich.table import Table

    table = Table(box=box.SIMPLE_HEAD, pad_edge=False)
    for position, column in enumerate(columns):
        table.add_column(column, justify="right" if position in right else "left", overflow="fold")
    return table


def _sessions(snapshot: Snapshot) -> Table:
    from rich.text import Text

    columns = ("session", "library", "reason", "jobs by state", "done", "results/s", "ETA", "efficiency", "device idle")
    table = _table(*columns, right=(0, 4, 5, 6, 7, 8))
    for session in _chosen(snapshot):
        total = sum(session.overview.jobs.values())
        cells = (
            session.overview.session_id,
            f"{session.overview.library} {session.overview.arch}",
            session.overview.reason,
            _jobs(session),
            _percent((total - session.unfinished) / total if total else None),
            f"{session.rate_per_s:.2f}",
            _eta(session),
            _percent(_efficiency(session)),
            _percent(_idle(session)),
        )
        table.add_row(*(Text(str(cell)) for cell in cells))
    return table


def _workers(snapshot: Snapshot) -> Table | Text:
    from rich.text import Text

    if snapshot.workers is None:
        return Text(f"workers: {_DASH} (Redis does not answer)")
    if not snapshot.workers:
        return Text("workers: none")
    roles = Counter(worker.role for worker in snapshot.workers)
    table = _table("worker", "role", "device", "current jobs", "done", right=(3, 4))
    table.title = "workers: " + ", ".join(f"{count} {role}" for role, count in sorted(roles.items()))
    table.title_justify = "left"
    for worker in snapshot.workers[:_MOST_WORKERS]:
        cells = (f"{worker.host}:{worker.pid}", worker.role, worker.device or _DASH, len(worker.job_ids), worker.done)
        table.add_row(*(Text(str(cell)) for cell in cells))
    return table


def _failures(session: LiveSession) -> list[str]:
    texts = []
    for failure in session.overview.failures:
        last = (failure.output_tail.strip().splitlines() or ["(no output)"])[-1]
        texts.append(f"session {session.overview.session_id}: {failure.attempts} {failure.cause}: {last[:200]}")
        if failure.reproduce:
            texts.append(f"  reproduce: {failure.reproduce}")
    return texts


def _jobs(session: LiveSession) -> str:
    return ", ".join(f"{count} {state}" for state, count in session.overview.jobs.items()) or "no jobs"


def _percent(share: float | None) -> str:
    return _DASH if share is None else f"{100 * share:.0f} %"


def _efficiency(session: LiveSession) -> float | None:
    return session.totals.efficiency if session.totals else None


def _idle(session: LiveSession) -> float | None:
    return session.totals.idle_share if session.totals else None


def _eta(session: LiveSession) -> str:
    seconds = session.eta_s
    if seconds is None:
        return _DASH
    minutes, rest = divmod(round(seconds), 60)
    hours, minutes = divmod(minutes, 60)
    return f"{hours}:{minutes:02}:{rest:02}"


def _document(snapshot: Snapshot) -> dict[str, Any]:
    fields = asdict(snapshot) | {"at": snapshot.at.isoformat()}
    for session, shown in zip(snapshot.sessions, fields["sessions"], strict=True):
        if session.totals is not None:
            shown["totals"] |= {"efficiency": session.totals.efficiency, "lower_bound_s": session.totals.lower_bound_s}
    return fields
