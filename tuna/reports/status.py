"""The data of `tuna status --watch`: sessions from SQL, live workers from Redis."""

from __future__ import annotations

import statistics
from collections import Counter, defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from datetime import datetime, timedelta
from typing import TYPE_CHECKING

import sqlalchemy as sa

from tuna.db import jobs, overview, sessions
from tuna.db.engine import reading
from tuna.db.models import Job, StepResult
from tuna.db.types import utc_now
from tuna.errors import TunaError
from tuna.libraries.base import Library
from tuna.libraries.registry import get_library
from tuna.pipeline.reproduction import with_commands
from tuna.pipeline.states import is_open
from tuna.reports.totals import SessionTotals, Totals
from tuna.settings import Settings
from tuna.vocabulary import Resource

if TYPE_CHECKING:
    from tuna.membership.heartbeat import WorkerStatus

#: Window of the rate in seconds, and maximum number of the newest results that it is read from.
_RATE_WINDOW_S = 60.0
_RATE_ROWS = 5000
#: Number of the latest jobs of each state whose durations give the median.
_SAMPLE = 100
_ROLES = {Resource.CPU: "compile", Resource.DEVICE: "eval"}


@dataclass(frozen=True)
class LiveSession:
    """Progress of one session."""

    overview: overview.Overview
    unfinished: int
    rate_per_s: float  #: results in the last minute
    eta_s: float | None  #: None: not known yet, or no live worker
    totals: SessionTotals | None  #: None: not all results are read yet, or there are none


@dataclass(frozen=True)
class Snapshot:
    """State of all sessions, or of one, at a moment."""

    at: datetime
    sessions: tuple[LiveSession, ...]
    workers: tuple[WorkerStatus, ...] | None  #: None: Redis is unreachable
    read_share: float  #: share of the results that the totals cover


class Watcher:
    """Takes snapshots repeatedly; reads only new results."""

    def __init__(self, engine: sa.Engine, settings: Settings, session_id: int | None = None) -> None:
        self._engine = engine
        self._settings = settings
        self._only = session_id
        self._totals = Totals(trials=False)

    def look(self, budget_s: float = 0.5) -> Snapshot:
        """A snapshot; a long history is read in parts of about `budget_s` seconds. Raises NotFound."""
        found = with_commands(self._engine, overview.read(self._engine, self._only))
        with reading(self._engine) as connection:
            whole = self._totals.advance(connection, budget_s)
            namespace = sessions.namespace(connection)
            if self._only is not None and not found:
                sessions.get(connection, self._only)
            rates = _rates(connection)
            workers = live_workers(self._settings, namespace)
            totals = self._totals.sessions() if whole else {}
            shown = []
            for seen in found:
                outlook = _Outlook(connection, sessions.get(connection, seen.session_id))
                shown.append(
                    LiveSession(
                        overview=seen,
                        unfinished=outlook.unfinished,
                        rate_per_s=rates.get(seen.session_id, 0.0),
                        eta_s=outlook.eta_s(workers, totals.get(seen.session_id)),
                        totals=totals.get(seen.session_id),
                    )
                )
        return Snapshot(utc_now(), tuple(shown), workers, 1.0 if whole else self._totals.share)


def live_workers(settings: Settings, namespace: str) -> tuple[WorkerStatus, ...] | None:
    """The workers with a heartbeat; None when Redis does not answer. Starts no embedded Redis."""
    import redis

    from tuna import redis_client
    from tuna.membership.heartbeat import HeartbeatBoard
    from tuna.pipeline.connection import redis_url

    try:
        client = redis_client.single_attempt_client(redis_url(settings), 1.0)
        return tuple(HeartbeatBoard(client, namespace, settings.lease_s).live())
    except (redis.RedisError, OSError, ValueError, TunaError):
        return None


def _rates(connection: sa.Connection) -> dict[int, float]:
    """Results a second of each session in the last minute, from the newest rows: a range of the primary key."""
    now = utc_now()
    newest = connection.execute(sa.select(sa.func.max(StepResult.id))).scalar() or 0
    rows = connection.execute(
        sa.select(Job.session_id, sa.func.count(), sa.func.min(StepResult.ended_at))
        .join(Job, Job.id == StepResult.job_id)
        .where(
            StepResult.id > newest - _RATE_ROWS,
            StepResult.ended_at >= now - timedelta(seconds=_RATE_WINDOW_S),
            StepResult.worker != "",
        )
        .group_by(Job.session_id)
    )
    return {session: count / max(1.0, (now - oldest).total_seconds()) for session, count, oldest in rows if oldest}


class _Outlook:
    """Remaining work of a session, and its duration."""

    def __init__(self, connection: sa.Connection, info: sessions.SessionInfo) -> None:
        self._environment = info.environment
        self._library = get_library(info.environment.library)
        counts = jobs.by_state(connection, info.id)
        self.unfinished = sum(
            n for (state, step), n in counts.items() if is_open(state, self._library.step(step).resource)
        )
        sample = {group: _latest(connection, info.id, *group) for group in counts if self.unfinished}
        self._left = _left(self._library, counts, sample)
        self._median_s = _medians(connection, [job for rows in sample.values() for job, _ in rows])

    def eta_s(self, workers: Sequence[WorkerStatus] | None, totals: SessionTotals | None) -> float | None:
        """Seconds until the busier kind of resource is done, if all capable workers work on this session."""
        seconds: dict[Resource, float] = defaultdict(float)
        for step, number in self._left.items():
            if step not in self._median_s:
                return None
            seconds[self._library.step(step).resource] += number * self._median_s[step]
        found = [0.0]
        for resource, needed_s in seconds.items():
            count = self._workers(resource, workers, totals)
            if not count:
                return None
            found.append(needed_s / count)
        return max(found) if self._left else None

    def _workers(
        self, resource: Resource, workers: Sequence[WorkerStatus] | None, totals: SessionTotals | None
    ) -> int | None:
        """Live workers; the largest number so far when Redis is unreachable."""
        if workers is None:
            return None if totals is None else totals.devices if resource is Resource.DEVICE else totals.processes
        here = [worker for worker in workers if worker.role == _ROLES[resource]]
        if resource is Resource.DEVICE:
            # Empty: a worker for several environments.
            return sum(worker.environment in ("", self._environment.machine_key) for worker in here)
        return sum(self._environment.toolchain in worker.toolchains for worker in here)


def _latest(connection: sa.Connection, session_id: int, state: str, step: str) -> list[tuple[int, str]]:
    """(id, steps) of the latest jobs of a state: the end of a range of ix_job_claim."""
    rows = connection.execute(
        sa.select(Job.id, Job.steps)
        .where(Job.session_id == session_id, Job.step == step, Job.state == state)
        .order_by(Job.id.desc())
        .limit(_SAMPLE)
    )
    return [(row.id, row.steps) for row in rows]


def _left(
    library: Library, counts: Mapping[tuple[str, str], int], sample: Mapping[tuple[str, str], list[tuple[int, str]]]
) -> dict[str, float]:
    """How often each step is still to be run; jobs of a state are taken to have the steps that its latest have."""
    left: dict[str, float] = defaultdict(float)
    for (state, step), count in counts.items():
        if not is_open(state, library.step(step).resource):
            continue
        kinds = Counter(steps for _, steps in sample[state, step])
        for steps, number in kinds.items():
            order = jobs.step_names(steps)
            for later in order[order.index(step) :]:
                left[later] += count * number / kinds.total()
    return dict(left)


def _medians(connection: sa.Connection, job_ids: Sequence[int]) -> dict[str, float]:
    """Median duration in seconds of each step, over good attempts of these jobs (unique key: job_id, step, attempt)."""
    durations: dict[str, list[float]] = defaultdict(list)
    rows = connection.execute(
        sa.select(StepResult.step, StepResult.started_at, StepResult.ended_at).where(
            StepResult.job_id.in_(job_ids), StepResult.cause.is_(None)
        )
    )
    for step, started_at, ended_at in rows:
        if started_at and ended_at:
            durations[step].append((ended_at - started_at).total_seconds())
    return {step: statistics.median(values) for step, values in durations.items()}
