"""The timeline of a session, in the JSON form of Chrome's trace events, which
https://ui.perfetto.dev opens.

Format: "Trace Event Format" (Google, 2016). A machine is a process, a worker process or a device a
thread of it, an accepted attempt at a step a complete event (`X`). Arrows (`bind_id`) lead from
each attempt of a job to its next one, an instant event (`i`) is at the end of each that failed.
The rounds of searches are in a process of their own. Times are microseconds since the epoch, as
SQL has them.
"""

from __future__ import annotations

import heapq
import json
from collections import defaultdict
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from datetime import datetime, timedelta, timezone
from itertools import chain
from pathlib import Path
from typing import Any, NamedTuple

import sqlalchemy as sa

from tuna.common.files import atomic_file
from tuna.common.messages import one_line
from tuna.common.version import __version__
from tuna.db import sessions
from tuna.db.engine import reading
from tuna.db.models import ConfigRow, Job, SolverRow, StepResultRow, TrialRow
from tuna.db.types import UtcDateTime
from tuna.errors import BadInput

_EPOCH, _US = datetime(1970, 1, 1, tzinfo=timezone.utc), timedelta(microseconds=1)
#: Number of rows of a streamed read that are in memory at a time
_ROWS = 1000
#: Maximum of characters of a layer's label, so that the file stays small
_LABEL_CHARS = 80
#: Names of the processes that show attempts whose worker was lost, and the rounds of searches
_LOST, _SEARCHES = "lost workers", "searches"
#: Facts of the session's environment that are in the file
_ABOUT = ("library", "library_version", "arch", "device", "target")
_TIMED = sa.and_(StepResultRow.started_at.is_not(None), StepResultRow.ended_at.is_not(None))
_OF_JOB: Mapping[str, Any] = {"partition_by": StepResultRow.job_id, "order_by": StepResultRow.id}
_encode = json.JSONEncoder(separators=(",", ":"), allow_nan=False).encode


@dataclass(frozen=True)
class Timeline:
    """Counts of a file with a timeline."""

    items: int
    machines: int
    untimed: int  #: number of attempts that are left out, since no worker said when they ran
    size_bytes: int


class _Lane(NamedTuple):
    """A thread of a process, both as numbers in the file."""

    pid: int
    tid: int


class _Rows:
    """Processes and threads by name; each is named in the file when it is used first.

    Items that overlap, which the format does not allow in a thread, are in threads of the same
    name.
    """

    def __init__(self) -> None:
        self._numbers = 0
        self._pids: dict[str, int] = {}
        #: heaps of the times at which each lane is free again
        self._lanes: defaultdict[tuple[str, str], list[tuple[int, _Lane]]] = defaultdict(list)

    def __len__(self) -> int:
        return len(self._pids.keys() - {_LOST, _SEARCHES})

    def lane(
        self, process: str, thread: str, start: int, end: int
    ) -> tuple[_Lane, list[dict[str, Any]]]:
        """Return the lane for an event of this time, which must not be before earlier ones, and the
        events that name what is new."""
        lanes, new = self._lanes[process, thread], list[dict[str, Any]]()
        if lanes and lanes[0][0] <= start:
            lane = lanes[0][1]
            heapq.heapreplace(lanes, (end, lane))
            return lane, new
        pid = self._pids.get(process)
        if pid is None:
            pid = self._pids[process] = self._number()
            new.append(_named("process_name", _Lane(pid, pid), process))
        lane = _Lane(pid, self._number())
        new.append(_named("thread_name", lane, f"{thread} ({len(lanes) + 1})" if lanes else thread))
        heapq.heappush(lanes, (end, lane))
        return lane, new

    def _number(self) -> int:
        self._numbers += 1
        return self._numbers


def write_timeline(engine: sa.Engine, session_id: int, path: Path) -> Timeline:
    """Write the session's timeline; the memory that it takes does not grow with the session.

    Raises NotFound, BadInput for a session without attempts, StorageFull.
    """
    with reading(engine) as connection:
        session = sessions.get(connection, session_id)
        timed, attempts = _counts(connection, session_id)
        if not timed:
            raise BadInput(f"Nothing of session {session_id} has been done yet.")
        about = {name: getattr(session.environment, name) for name in _ABOUT}
        about = {"tuna": __version__, "session": session_id, "reason": session.reason, **about}
        rows = _Rows()
        with atomic_file(path) as temporary:
            with open(temporary, "w", encoding="utf-8") as file:
                start = f'{{"displayTimeUnit":"ms","otherData":{_encode(about)},"traceEvents":[\n'
                for event in chain(
                    _items(connection, session_id, rows), _rounds(connection, session_id, rows)
                ):
                    file.write(start)
                    file.write(_encode(event))
                    start = ",\n"
                file.write("\n]}\n")
            return Timeline(timed, len(rows), attempts - timed, temporary.stat().st_size)


def _counts(connection: sa.Connection, session_id: int) -> tuple[int, int]:
    """Return how many attempts have a start and an end, and how many there are."""
    timed = sa.func.sum(sa.case((_TIMED, 1), else_=0))
    query = sa.select(timed, sa.func.count()).select_from(StepResultRow).join(Job)
    found = connection.execute(query.where(Job.session_id == session_id)).one()
    return found[0] or 0, found[1]


def _items(connection: sa.Connection, session_id: int, rows: _Rows) -> Iterator[dict[str, Any]]:
    """Yield the events of all attempts, by their start."""
    row = StepResultRow
    trials = sa.select(sa.func.count()).where(TrialRow.job_id == Job.id).scalar_subquery()
    query = (
        sa.select(
            *(row.job_id, row.step, row.attempt, row.ok, row.cause, row.worker, row.device),
            *(row.started_at, row.ended_at, Job.search_id, Job.round, Job.part),
            *(ConfigRow.label, SolverRow.name, trials),
            sa.func.lag(row.ended_at, type_=UtcDateTime()).over(**_OF_JOB),
            sa.func.lead(row.id).over(**_OF_JOB),
        )
        .select_from(row)
        .join(Job)
        .join(ConfigRow, ConfigRow.id == Job.config_id)
        .join(SolverRow, SolverRow.id == Job.solver_id)
        .where(Job.session_id == session_id, _TIMED)
        .order_by(row.started_at, row.id)
    )
    for item in connection.execution_options(yield_per=_ROWS).execute(query):
        job, step, attempt, ok, cause, worker, device, began, ended, search, *rest = item
        round_, part, label, solver, tried, before, after = rest
        start, end = _us(began), _us(ended)
        machine, _, process = worker.rpartition(":")
        thread = device or (f"process {process}" if worker else "unknown")
        lane, new = rows.lane(machine or _LOST, thread, start, end)
        yield from new
        args = {"layer": one_line(label, _LABEL_CHARS), "solver": solver, "job": job}
        args |= {"attempt": attempt, "trials": tried}
        if search is not None:
            args |= {"round": round_} | ({"part": part} if part else {})
        event = {"name": step, "ph": "X", "ts": start, "dur": max(0, end - start)}
        event |= {**lane._asdict(), "args": args}
        if before is not None or after is not None:
            event["bind_id"] = job
        if before is not None:
            event["flow_in"] = True
            args["waited_ms"] = (start - _us(before)) / 1000
        if after is not None:
            event["flow_out"] = True
        if not ok:
            args["cause"] = cause
        yield event
        if not ok:
            name = f"{'failed' if after is None else 'retry'}: {cause}"
            yield {"name": name, "ph": "i", "s": "t", "ts": end, **lane._asdict()}


def _rounds(connection: sa.Connection, session_id: int, rows: _Rows) -> Iterator[dict[str, Any]]:
    """Yield an event for each round of each search, from the first start to the last end of its
    attempts."""
    names = (Job.search_id, Job.round, ConfigRow.label, SolverRow.name)
    query = (
        sa.select(
            *names,
            sa.func.min(StepResultRow.started_at),
            sa.func.max(StepResultRow.ended_at),
            sa.func.count(),
        )
        .select_from(StepResultRow)
        .join(Job)
        .join(ConfigRow, ConfigRow.id == Job.config_id)
        .join(SolverRow, SolverRow.id == Job.solver_id)
        .where(Job.session_id == session_id, Job.search_id.is_not(None), _TIMED)
        .group_by(*names)
        .order_by(Job.search_id, Job.round)
    )
    for search, round_, label, solver, began, ended, count in connection.execution_options(
        yield_per=_ROWS
    ).execute(query):
        start, end = _us(began), _us(ended)
        thread = f"{one_line(label, _LABEL_CHARS)}, {solver}"
        lane, new = rows.lane(_SEARCHES, thread, start, end)
        yield from new
        args = {"search": search, "attempts": count}
        event = {"name": f"round {round_}", "ph": "X", "ts": start, "dur": end - start}
        yield {**event, **lane._asdict(), "args": args}


def _us(moment: datetime | None) -> int:
    assert moment is not None
    return (moment - _EPOCH) // _US


def _named(what: str, lane: _Lane, name: str) -> dict[str, Any]:
    return {"name": what, "ph": "M", **lane._asdict(), "args": {"name": name}}
