"""The data of `tuna status --watch`: sessions from SQL, live workers from Redis."""

from __future__ import annotations

import dataclasses
import threading
import time
from collections import defaultdict
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from datetime import datetime, timedelta
from typing import TYPE_CHECKING

import sqlalchemy as sa

from tuna.coordinator import forecast
from tuna.coordinator.policies import StageTimes
from tuna.coordinator.waited_for import waited_for
from tuna.db import known_sessions, overview, sessions
from tuna.db.engine import reading
from tuna.db.models import Job, StepResultRow
from tuna.db.types import utc_now
from tuna.errors import ServiceError, TunaError
from tuna.jobs.serving import SessionWork, read_works
from tuna.libraries.registry import find_library, get_library
from tuna.libraries.steps import find_step
from tuna.queue.reproduction import with_commands
from tuna.reports.queries import read_peaks
from tuna.reports.report_data import DeviceFigures
from tuna.reports.totals import SessionTotals, Totals
from tuna.settings import Settings
from tuna.vocabulary import Resource, State

if TYPE_CHECKING:
    from tuna.queue.heartbeat import WorkerStatus

#: Seconds over which the rate is taken, and maximum of the newest results that it is read from
_RATE_WINDOW_S = 60.0
_RATE_ROWS = 5000
#: Seconds after which failures are read again: a later attempt may have mended them
_FAILURES_S = 10.0
#: Seconds to wait for an answer of Redis
_REDIS_S = 1.0
_ROLES = {Resource.CPU: "compile", Resource.DEVICE: "eval"}


@dataclass(frozen=True)
class LiveSession:
    """Progress of one session."""

    overview: overview.Overview
    unfinished: int
    rate_per_s: float  #: results per second in the last minute
    eta_s: float | None  #: seconds left; None: not known yet, or no live worker
    #: totals of the session; None: not all results are read yet, or there are none
    totals: SessionTotals | None
    #: resource that its published jobs wait for, such as "an eval worker"; empty: none
    waits_for: str = ""


@dataclass(frozen=True)
class LiveSnapshot:
    """State of all sessions, or of one, at a moment."""

    at: datetime
    sessions: tuple[LiveSession, ...]
    workers: tuple[WorkerStatus, ...] | None  #: live workers; None: Redis is unreachable
    read_share: float  #: share of the results that the totals cover


class Watcher:
    """Takes snapshots repeatedly, also for several threads; reads only new results."""

    def __init__(
        self, engine: sa.Engine, settings: Settings, session_id: int | None = None
    ) -> None:
        self._engine = engine
        self._settings = settings
        self._only = None if session_id is None else (session_id,)
        self._one_at_a_time = threading.Lock()
        self._totals = Totals(trials=False)
        self._failures: dict[int, tuple[overview.Failure, ...]] = {}
        self._failures_of: object = None  #: last value of what the failures depend on
        self._failures_at = 0.0

    def look(
        self, budget_s: float = 0.5, session_ids: Collection[int] | None = None
    ) -> LiveSnapshot:
        """A snapshot; a long history is read in parts of about `budget_s` seconds. `session_ids`:
        of these alone, as far as they are there. Raises NotFound."""
        with self._one_at_a_time:
            snapshot = self._look(budget_s, session_ids)
        in_flight = [one.overview.session_id for one in snapshot.sessions if one.overview.in_flight]
        found = waits(self._engine, self._settings, in_flight) if in_flight else {}
        return dataclasses.replace(
            snapshot,
            sessions=tuple(
                dataclasses.replace(one, waits_for=found.get(one.overview.session_id, ""))
                for one in snapshot.sessions
            ),
        )

    def _look(self, budget_s: float, session_ids: Collection[int] | None) -> LiveSnapshot:
        with reading(self._engine) as connection:
            wanted: tuple[int, ...] | None = self._only
            if session_ids is not None:
                wanted = known_sessions.existing(connection, session_ids)
            whole = self._totals.advance(connection, budget_s)
            namespace = sessions.namespace(connection)
            rates = _rates(connection)
            workers = live_workers(self._settings, namespace)
            totals = self._totals.sessions(wanted) if whole else {}
            shown = []
            for seen, counts in self._overviews(connection, wanted, totals):
                session_totals = totals.get(seen.session_id)
                info = sessions.get(connection, seen.session_id)
                outlook = _outlook(connection, info, workers, session_totals, counts)
                shown.append(
                    LiveSession(
                        overview=seen,
                        unfinished=outlook.unfinished,
                        rate_per_s=rates.get(seen.session_id, 0.0),
                        eta_s=outlook.eta_s,
                        totals=session_totals,
                    )
                )
        return LiveSnapshot(utc_now(), tuple(shown), workers, 1.0 if whole else self._totals.share)

    def devices(self, session_id: int, budget_s: float = 0.2) -> tuple[DeviceFigures, ...]:
        """The use of each device that measured for a session; raises NotFound, or ServiceError
        while the history is being read, for about `budget_s` seconds by each call."""
        with self._one_at_a_time, reading(self._engine) as connection:
            peaks = read_peaks(connection, session_id)
            if not self._totals.advance(connection, budget_s):
                raise ServiceError(
                    f"The history is being read, {self._totals.share:.0%} so far.",
                    hint="ask again in a few seconds",
                )
            mine = self._totals.sessions([session_id]).get(session_id)
        return tuple(
            DeviceFigures(**vars(use), **peaks.get(use.name, {}))
            for use in (mine.uses if mine else ())
        )

    def _overviews(
        self,
        connection: sa.Connection,
        wanted: tuple[int, ...] | None,
        totals: Mapping[int, SessionTotals],
    ) -> list[tuple[overview.Overview, overview.Counts]]:
        """Sessions with the numbers of their jobs. Failures are read again where more jobs or
        attempts failed, and now and then."""
        if wanted == ():
            return []
        counts = overview.count_jobs(connection, wanted or ())
        errored = [
            (session_id, key, number)
            for session_id, numbers in counts.items()
            for key, number in numbers.items()
            if key[0] == State.ERRORED.value
        ]
        depends_on = wanted, errored, [(session, totals[session].causes) for session in totals]
        known = (
            self._failures
            if depends_on == self._failures_of
            and time.monotonic() - self._failures_at < _FAILURES_S
            else None
        )
        overviews = overview.read(self._engine, *(wanted or ()), counts=counts, failures=known)
        if known is None:
            overviews = with_commands(self._engine, overviews)
            self._failures = {info.session_id: info.failures for info in overviews}
            self._failures_of, self._failures_at = depends_on, time.monotonic()
        return [(info, counts.get(info.session_id, {})) for info in overviews]


def waits(engine: sa.Engine, settings: Settings, session_ids: Collection[int]) -> dict[int, str]:
    """Return what the published jobs of sessions wait for, such as "an eval worker", by session;
    without those that workers are at work on."""
    import redis

    from tuna.queue.connection import redis_url, uses_embedded
    from tuna.queue.heartbeat import HeartbeatBoard
    from tuna.queue.leases import Leases
    from tuna.services import redis_client

    with reading(engine) as connection:
        works = read_works(connection, known_sessions.existing(connection, session_ids))
        namespace = sessions.namespace(connection)
    try:
        client = redis_client.single_attempt_client(redis_url(settings), _REDIS_S)
        workers = HeartbeatBoard(client, namespace, settings.lease_s).live()
        published = Leases(client, namespace, settings.lease_s).published()
    except (redis.RedisError, OSError, ValueError, TunaError) as error:
        ended = uses_embedded(settings) and type(error) is redis.ConnectionError
        why = "`tuna run`, which does not run" if ended else f"Redis ({error})"
        return {work.session_id: why for work in works}
    reasons = {work.session_id: waited_for([work], workers, published) for work in works}
    return {session_id: what for session_id, what in reasons.items() if what}


def live_workers(settings: Settings, namespace: str) -> tuple[WorkerStatus, ...] | None:
    """The workers with a heartbeat; None when Redis does not answer.

    Starts no embedded Redis: where none runs, there are no workers either.
    """
    import redis

    from tuna.queue.connection import redis_url, uses_embedded
    from tuna.queue.heartbeat import HeartbeatBoard
    from tuna.services import redis_client

    try:
        client = redis_client.single_attempt_client(redis_url(settings), _REDIS_S)
        return tuple(HeartbeatBoard(client, namespace, settings.lease_s).live())
    except (redis.RedisError, OSError, ValueError, TunaError) as error:
        return () if uses_embedded(settings) and type(error) is redis.ConnectionError else None


def dropped_messages(settings: Settings) -> int:
    """The number of messages that no coordinator sent; 0 when Redis does not answer."""
    import redis

    from tuna.queue.connection import impatient_client
    from tuna.queue.envelopes import dropped

    try:
        return dropped(impatient_client(settings, _REDIS_S))
    except (redis.RedisError, OSError, TunaError):
        return 0


def _rates(connection: sa.Connection) -> dict[int, float]:
    """Results a second of each session in the last minute, from the newest rows: a range of the
    primary key."""
    now = utc_now()
    newest = connection.execute(sa.select(sa.func.max(StepResultRow.id))).scalar() or 0
    rows = connection.execute(
        sa.select(Job.session_id, sa.func.count(), sa.func.min(StepResultRow.ended_at))
        .join(Job, Job.id == StepResultRow.job_id)
        .where(
            StepResultRow.id > newest - _RATE_ROWS,
            StepResultRow.ended_at >= now - timedelta(seconds=_RATE_WINDOW_S),
            StepResultRow.worker != "",
        )
        .group_by(Job.session_id)
    )
    return {
        session: count / max(1.0, (now - oldest).total_seconds())
        for session, count, oldest in rows
        if oldest
    }


@dataclass(frozen=True)
class Outlook:
    """The rest of a session, if all capable workers work on it alone. Of a search only open
    rounds count."""

    unfinished: int  #: number of unfinished jobs
    eta_s: float | None  #: seconds left; None: not known yet, or no live worker
    #: median of |duration - predicted| / duration of its stages; None: not known
    prediction_error: float | None
    deadline: datetime | None = None

    @property
    def can_be_kept(self) -> bool | None:
        """Whether the deadline can be kept; None: there is none, nothing is left, or it is not
        known."""
        if self.deadline is None or not self.unfinished:
            return None
        if self.deadline <= utc_now():
            return False
        if self.eta_s is None:
            return None
        return utc_now() + timedelta(seconds=self.eta_s) <= self.deadline


def read_outlook(engine: sa.Engine, settings: Settings, session_id: int) -> Outlook | None:
    """The outlook of one session, None if its library is not installed here; raises NotFound."""
    with reading(engine) as connection:
        info = sessions.get(connection, session_id)
        if find_library(info.environment.library) is None:
            return None
        return _outlook(
            connection, info, live_workers(settings, sessions.namespace(connection)), None
        )


def _outlook(
    connection: sa.Connection,
    info: sessions.SessionInfo,
    workers: Sequence[WorkerStatus] | None,
    totals: SessionTotals | None,
    counts: overview.Counts | None = None,
) -> Outlook:
    library = get_library(info.environment.library)
    work = SessionWork(info.id, info.environment, library)
    left, times = forecast.left(connection, work, counts), StageTimes()
    if left.stages:
        forecast.learn(connection, work, left.sample, times)
    eta_s: float | None = None
    if left.stages and left.is_known(times):
        seconds, queues = left.seconds(times), defaultdict[Resource, set[str]](set)
        for kind in left.stages:
            queues[find_step(library, kind.step).resource].add(kind.queue)
        processes = {resource: _workers(info, resource, workers, totals) for resource in queues}
        if all(processes.values()):
            eta_s = max(
                sum(seconds[queue] for queue in queues[resource]) / (count or 1)
                for resource, count in processes.items()
            )
    return Outlook(left.jobs, eta_s, left.error(times), info.options.deadline)


def _workers(
    info: sessions.SessionInfo,
    resource: Resource,
    workers: Sequence[WorkerStatus] | None,
    totals: SessionTotals | None,
) -> int | None:
    """Live workers; the largest number so far when Redis is unreachable."""
    if workers is None:
        if totals is None:
            return None
        return totals.devices if resource is Resource.DEVICE else totals.processes
    here = [worker for worker in workers if worker.role == _ROLES[resource]]
    if resource is Resource.DEVICE:
        # Empty: a worker for several environments.
        return sum(worker.environment in ("", info.environment.machine_key) for worker in here)
    return sum(info.environment.toolchain in worker.toolchains for worker in here)
