"""Sums over all step results and trials that are kept up to date: each look reads only what came
since the last one."""

from __future__ import annotations

import time
from collections import Counter, defaultdict
from collections.abc import Collection, Iterable, Iterator, Mapping
from dataclasses import dataclass
from datetime import datetime

import sqlalchemy as sa

from tuna.db.models import Job, StepResultRow, TrialRow

#: Maximum of rows that one statement sums up
_CHUNK = 50_000
#: Number of the newest rows that are summed up anew each time: ids are assigned before the commit,
#: so a smaller id may appear later; fewer with SQLite, where one transaction writes at a time
_UNSETTLED, _UNSETTLED_IN_SQLITE = 20_000, 2000


@dataclass(frozen=True)
class Key:
    """The key that step results are grouped by."""

    session_id: int
    device: str  #: name of the device; empty for a step on a CPU
    worker: str  #: name of the worker; empty for an attempt whose worker was lost
    cause: str | None


@dataclass
class Sum:
    """Step results of one key."""

    attempts: int = 0
    busy_s: float = 0.0
    first: datetime | None = None
    last: datetime | None = None

    def add(
        self, attempts: int, busy_s: float, first: datetime | None, last: datetime | None
    ) -> None:
        """Count more of them."""
        self.attempts += attempts
        self.busy_s += busy_s
        self.first = min((moment for moment in (self.first, first) if moment), default=None)
        self.last = max((moment for moment in (self.last, last) if moment), default=None)

    @property
    def span_s(self) -> float:
        """From the first start to the last end."""
        return (self.last - self.first).total_seconds() if self.first and self.last else 0.0


@dataclass(frozen=True)
class DeviceBusyTime:
    """The use of the devices with one name, each between the first and the last measurement of its
    worker."""

    name: str
    steps: int
    busy_s: float
    span_s: float

    @property
    def idle_share(self) -> float | None:
        """Part of the span in which it measured nothing; None if the span is not known."""
        return min(1.0, max(0.0, 1 - self.busy_s / self.span_s)) if self.span_s > 0 else None


@dataclass(frozen=True)
class SessionTotals:
    """Cost of one session so far; times are in seconds."""

    attempts: int
    drained: int  #: number of attempts that a worker reported
    trials: int
    causes: dict[str, int]
    wall_s: float  #: seconds from the first start to the last end
    device_s: float
    devices: int
    cpu_s: float
    processes: int  #: maximum of compile processes at one time
    #: share of the devices' time without work, each from the first to the last measurement of its
    #: worker
    idle_share: float | None
    uses: tuple[DeviceBusyTime, ...]

    @property
    def lower_bound_s(self) -> float:
        """No schedule on these devices and processes is shorter: the busier of the two kinds,
        evenly spread."""
        return max(self.device_s / max(1, self.devices), self.cpu_s / max(1, self.processes))

    @property
    def efficiency(self) -> float | None:
        """Lower bound over wall time: 1 when the busier kind of resource never waited."""
        known = self.wall_s and self.lower_bound_s
        return min(1.0, self.lower_bound_s / self.wall_s) if known else None


class Totals:
    """Sums by session; one instance belongs to one thread at a time."""

    def __init__(self, *, trials: bool) -> None:
        """`trials`: count those too."""
        self._steps = _Running(StepResultRow, _STEPS)
        self._trials = _Running(TrialRow, _TRIALS) if trials else None

    def advance(self, connection: sa.Connection, budget_s: float) -> bool:
        """Read what is new, for about `budget_s` seconds; False if there is more, and the sums are
        not yet whole."""
        deadline = time.monotonic() + budget_s
        done = self._steps.advance(connection, deadline)
        return (self._trials is None or self._trials.advance(connection, deadline)) and done

    @property
    def share(self) -> float:
        """Share of the step results that is read."""
        return self._steps.share

    def sessions(self, wanted: Collection[int] | None = None) -> dict[int, SessionTotals]:
        """The sums of every session that has any, or of those that are wanted."""
        grouped: dict[int, list[tuple[Key, Sum]]] = defaultdict(list)
        for key, total in self._steps.sums(wanted).items():
            grouped[key.session_id].append((key, total))
        counted = self._trials.sums(wanted).items() if self._trials else ()
        trials = {key.session_id: total.attempts for key, total in counted}
        return {
            number: _of_session(grouped.get(number, []), trials.get(number, 0))
            for number in sorted(grouped.keys() | trials.keys())
        }


class _Running:
    """The sums over one table, in the order of its ids."""

    def __init__(
        self, table: type[StepResultRow] | type[TrialRow], statement: sa.Executable
    ) -> None:
        """`statement` groups the rows whose id is in (`low`, `high`]: the fields of a key, then of
        its sum."""
        self._newest = sa.select(sa.func.max(table.id))
        self._statement = statement
        self._settled_to = self._high = 0
        self._settled: dict[Key, Sum] = defaultdict(Sum)
        self._tail: dict[Key, Sum] = {}

    @property
    def share(self) -> float:
        return self._settled_to / self._high if self._high > _UNSETTLED else 1.0

    def advance(self, connection: sa.Connection, deadline: float) -> bool:
        self._high = connection.execute(self._newest).scalar() or 0
        is_sqlite = connection.dialect.name == "sqlite"
        tail = min(_UNSETTLED, _UNSETTLED_IN_SQLITE) if is_sqlite else _UNSETTLED
        settle_to = max(self._settled_to, self._high - tail)
        while self._settled_to < settle_to:
            to = min(self._settled_to + _CHUNK, settle_to)
            self._read(connection, self._settled, self._settled_to, to)
            self._settled_to = to
            if time.monotonic() > deadline and to < settle_to:
                return False
        self._tail = defaultdict(Sum)
        self._read(connection, self._tail, settle_to, self._high)
        return True

    def _read(self, connection: sa.Connection, sums: dict[Key, Sum], low: int, high: int) -> None:
        rows = connection.execute(self._statement, {"low": low, "high": high})
        for *key, attempts, busy_s, first, last in rows:
            sums[Key(*key)].add(attempts, busy_s or 0.0, first, last)

    def sums(self, sessions: Collection[int] | None = None) -> dict[Key, Sum]:
        both: dict[Key, Sum] = defaultdict(Sum)
        for part in (self._settled, self._tail):
            for key, total in part.items():
                if sessions is None or key.session_id in sessions:
                    both[key].add(total.attempts, total.busy_s, total.first, total.last)
        return both


def _range(table: type[StepResultRow] | type[TrialRow]) -> sa.ColumnElement[bool]:
    """A range of the primary key; the job's gives the session."""
    return sa.and_(table.id > sa.bindparam("low"), table.id <= sa.bindparam("high"))


_STEPS = (
    sa.select(
        *(Job.session_id, StepResultRow.device, StepResultRow.worker, StepResultRow.cause),
        sa.func.count(),
        sa.func.sum(StepResultRow.busy_s),
        sa.func.min(StepResultRow.started_at),
        sa.func.max(StepResultRow.ended_at),
    )
    .select_from(StepResultRow)
    .join(Job, Job.id == StepResultRow.job_id)
    .where(_range(StepResultRow))
    .group_by(Job.session_id, StepResultRow.device, StepResultRow.worker, StepResultRow.cause)
)
_TRIALS = (
    sa.select(
        *(Job.session_id, sa.literal(""), sa.literal(""), sa.null()),
        *(sa.func.count(), sa.literal(0.0), sa.null(), sa.null()),
    )
    .select_from(TrialRow)
    .join(Job, Job.id == TrialRow.job_id)
    .where(_range(TrialRow))
    .group_by(Job.session_id)
)


def _of_session(parts: Iterable[tuple[Key, Sum]], trials: int) -> SessionTotals:
    whole, causes = Sum(), Counter[str]()
    # the devices of a machine may have one name, and each has a worker of its own
    devices: dict[tuple[str, str], Sum] = defaultdict(Sum)
    processes: dict[str, Sum] = defaultdict(Sum)
    drained = 0
    for key, part in parts:
        facts = (part.attempts, part.busy_s, part.first, part.last)
        whole.add(*facts)
        if key.cause is not None:
            causes[key.cause] += part.attempts
        if not key.worker:
            continue
        drained += part.attempts
        use = devices[key.device, key.worker] if key.device else processes[key.worker]
        use.add(*facts)
    span_s = sum(device.span_s for device in devices.values())
    used_s = sum(min(device.busy_s, device.span_s) for device in devices.values())
    return SessionTotals(
        attempts=whole.attempts,
        drained=drained,
        trials=trials,
        causes=dict(sorted(causes.items())),
        wall_s=whole.span_s,
        device_s=sum(device.busy_s for device in devices.values()),
        devices=max(len({name for name, _ in devices}), most_at_once(devices.values())),
        cpu_s=sum(process.busy_s for process in processes.values()),
        processes=most_at_once(processes.values()),
        idle_share=1 - used_s / span_s if span_s > 0 else None,
        uses=tuple(_uses(devices)),
    )


def _uses(devices: Mapping[tuple[str, str], Sum]) -> Iterator[DeviceBusyTime]:
    for name in sorted({name for name, _ in devices}):
        parts = [part for (device, _), part in devices.items() if device == name]
        steps, busy_s = sum(one.attempts for one in parts), sum(one.busy_s for one in parts)
        yield DeviceBusyTime(name, steps, busy_s, sum(one.span_s for one in parts))


def most_at_once(spans: Iterable[Sum]) -> int:
    """Return the largest number of spans that overlap: a process that was replaced by another
    counts once with it."""
    ends: list[tuple[datetime, int]] = []
    for span in spans:
        if span.first and span.last:
            ends += [(span.first, 1), (span.last, -1)]
    now = most = 0
    for _, change in sorted(ends):
        now += change
        most = max(most, now)
    return max(most, 1) if ends else 0
