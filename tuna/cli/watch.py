"""`tuna status --watch`: a live view on a terminal, a line (or JSON object) per interval
elsewhere."""

from __future__ import annotations

import contextlib
import json
import time
from collections import Counter
from dataclasses import asdict
from typing import Any

from rich.console import Console, Group, RenderableType
from rich.live import Live
from rich.text import Text

from tuna import api
from tuna.cli import show
from tuna.cli.console import duration, fitting, say, table
from tuna.messages import COMMAND_CHARS, counted, last_line, one_line
from tuna.vocabulary import State

#: More sessions than this do not fit a screen; those with work to do come first, then the newest.
_MOST_SESSIONS = 12
_MOST_WORKERS = 16
#: Columns that the jobs by state need at least: they are wrapped.
_NARROWEST = 20
#: Characters of a worker's host: with more there would be no table on 80 columns; `tuna workers`
#: has them all.
_HOST_CHARS = 30
_DASH = "–"


def watch(session_id: int | None, interval_s: float, *, as_json: bool) -> None:
    """Refresh every `interval_s` seconds until Ctrl-C."""
    watcher = api.watcher(session_id)
    console = Console()
    with contextlib.suppress(KeyboardInterrupt):
        if as_json or not console.is_terminal:
            while True:
                snapshot = watcher.look(interval_s)
                for text in [json.dumps(_document(snapshot))] if as_json else lines(snapshot):
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
        for session in _chosen(snapshot)
    ] or [f"{snapshot.at:%H:%M:%S} no sessions yet"]


def view(snapshot: api.LiveSnapshot, width: int = 160, height: int = 50) -> RenderableType:
    """All of it for a terminal; of what does not fit, the lesser columns and the last rows are left
    out."""
    workers = _workers(snapshot, width, min(_MOST_WORKERS, max(3, height // 4)))
    room = height - _lines(workers, width) - 1
    sessions = (_sessions(snapshot, width, most) for most in range(_MOST_SESSIONS, 0, -1))
    first = next(sessions)
    while _lines(first, width) > room and (smaller := next(sessions, None)) is not None:
        first = smaller
    parts: list[RenderableType] = [first, workers]
    aside = [f"{one.name} is aside: {one.aside}" for one in snapshot.workers or () if one.aside]
    parts += [Text(one_line(text), overflow="fold") for text in aside]
    parts += [
        Text(text, overflow="fold") for session in _chosen(snapshot) for text in _failures(session)
    ]
    if snapshot.read_share < 1.0:
        parts.append(Text(f"reading the history: {100 * snapshot.read_share:.0f} %"))
    parts.append(Text(f"{snapshot.at:%Y-%m-%d %H:%M:%S} UTC, Ctrl-C to leave", style="dim"))
    return Group(*parts)


def _lines(part: RenderableType, width: int) -> int:
    return len(Console(width=width).render_lines(part))


def _chosen(snapshot: api.LiveSnapshot, most: int = _MOST_SESSIONS) -> list[api.LiveSession]:
    first = sorted(
        snapshot.sessions,
        key=lambda session: (not session.unfinished, -session.overview.session_id),
    )
    return sorted(
        first[: min(most, _MOST_SESSIONS)], key=lambda session: session.overview.session_id
    )


def _sessions(snapshot: api.LiveSnapshot, width: int, most: int) -> RenderableType:
    chosen = _chosen(snapshot, most)
    rows = [
        (
            str(session.overview.session_id),
            _percent(_done(session)),
            f"{session.rate_per_s:.2f}",
            _eta(session),
            _jobs(session),
            f"{session.overview.library} {session.overview.arch}",
            session.overview.reason,
            _percent(_efficiency(session)),
            _percent(_idle(session)),
        )
        for session in chosen
    ]
    titles = (
        "session",
        "done",
        "results/s",
        "ETA",
        "jobs by state",
        "library",
        "reason",
        "efficiency",
        "device idle",
    )
    wrapped = titles.index("jobs by state")
    narrow = [[*row[:wrapped], row[wrapped][:_NARROWEST], *row[wrapped + 1 :]] for row in rows]
    kept = fitting(titles, narrow, (0, 0, 0, 0, 1, 2, 3, 4, 5), width)
    left = len(snapshot.sessions) - len(chosen)
    return table(
        f"{counted(len(snapshot.sessions), 'session')}, {left} of them not shown" if left else "",
        [titles[place] for place in kept],
        [[row[place] for place in kept] for row in rows],
        [position for position, place in enumerate(kept) if place in (0, 1, 2, 3, 7, 8)],
        width,
    )


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
    rows = [
        (
            f"{one_line(worker.host, _HOST_CHARS)}:{worker.pid}",
            worker.role,
            worker.device or _DASH,
            str(len(worker.job_ids)),
            str(worker.done),
        )
        for worker in snapshot.workers[:most]
    ]
    titles = ("worker", "role", "device", "current jobs", "done")
    kept = fitting(titles, rows, (0, 0, 1, 0, 0), width)
    return table(
        "workers: " + ", ".join(f"{count} {role}" for role, count in sorted(roles.items())),
        [titles[place] for place in kept],
        [[row[place] for place in kept] for row in rows],
        [position for position, place in enumerate(kept) if place in (3, 4)],
        width,
    )


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


def _document(snapshot: api.LiveSnapshot) -> dict[str, Any]:
    fields = asdict(snapshot) | {"at": snapshot.at.isoformat()}
    for session, shown in zip(snapshot.sessions, fields["sessions"], strict=True):
        options = shown["overview"].pop("options")
        shown["overview"] |= options.model_dump(mode="json")
        if session.totals is not None:
            shown["totals"] |= {
                "efficiency": session.totals.efficiency,
                "lower_bound_s": session.totals.lower_bound_s,
            }
    return fields
