"""The evidence for entries of a golden version: the other solvers of the layer, all repeats, the
other versions, and the command that measures it again."""

from __future__ import annotations

import json
from collections import defaultdict
from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass
from datetime import datetime
from typing import Any, NamedTuple

import sqlalchemy as sa

from tuna.common.messages import counted
from tuna.db.models import GoldenEntry, SolverRow, StepResultRow
from tuna.golden.versions import Version, entries_of, of_library
from tuna.libraries.items import WorkItem
from tuna.libraries.registry import find_library
from tuna.libraries.results import Spread
from tuna.libraries.steps import every_step
from tuna.queue.reproduction import Repeated, commands, item_command
from tuna.queue.work_items import seed
from tuna.results.selectable import last_good_attempts
from tuna.results.whole_results import spread_of

#: Maximum of slower solvers that the text names; JSON has all
_SHOWN = 3


@dataclass(frozen=True)
class EntryMeasurement:
    """Repeats of the measurement that an entry's time is the median of."""

    low_ms: float | None  #: lower end of the median's 95 % interval
    high_ms: float | None
    spread: Spread | None
    drift: float | None  #: change of the device's speed meanwhile, as a share of the speed

    def line(self) -> str:
        """All in one line."""
        found = []
        if self.low_ms is not None and self.high_ms is not None:
            found.append(f"95 % interval {self.low_ms:.6g} to {self.high_ms:.6g} ms")
        if self.spread is not None:
            repeats = counted(self.spread.repeats, "repeat")
            found.append(f"{repeats}, least {self.spread.min_ms:.6g} ms")
            found.append(f"quartiles {self.spread.iqr_ms:.3g} ms apart")
        if self.drift is not None:
            found.append(f"drift {self.drift:+.1%}")
        return "; ".join(found)

    def as_json(self) -> dict[str, Any]:
        """All fields."""
        return {**vars(self), "spread": self.spread and self.spread._asdict()}


@dataclass(frozen=True)
class OtherSolver:
    """Another solver's entry for the same layer on the same device."""

    entry_id: int
    solver: str
    time_ms: float
    low_ms: float | None
    high_ms: float | None
    margin: float  #: part by which its time exceeds the entry's: 0.1 is 10 % slower
    apart: bool | None  #: true if the intervals of the two do not overlap; None: not known

    def line(self) -> str:
        """The solver in one line."""
        apart = {True: ", intervals apart", False: ", intervals overlap", None: ""}[self.apart]
        return f"#{self.entry_id} {self.solver} {self.time_ms:.6g} ms ({self.margin:+.2%}{apart})"


@dataclass(frozen=True)
class EntryInVersion:
    """The entry (device, config, solver) in one version, and the fastest of its layer there."""

    version: int
    state: str
    promoted_at: datetime | None
    promoted_by: str
    note: str
    entry_id: int | None  #: id of the version's entry; None: the version has none, and no time
    time_ms: float | None
    fastest: str | None  #: solver of the fastest entry; None: the version does not have the layer
    fastest_ms: float | None

    def line(self) -> str:
        """The version in one line."""
        by = f" by {self.promoted_by}" if self.promoted_by else ""
        when = f" {self.promoted_at:%Y-%m-%d}{by}" if self.promoted_at else ""
        has = "-" if self.time_ms is None else f"{self.time_ms:.6g} ms (#{self.entry_id})"
        first = f"; fastest {self.fastest} {self.fastest_ms:.6g} ms" if self.fastest else ""
        note = f"; note: {self.note}" if self.note else ""
        return f"version {self.version} ({self.state}{when}): {has}{first}{note}"


@dataclass(frozen=True)
class Evidence:
    """All that speaks for an entry, and against it."""

    #: the entry's measurement; None: it was imported, or its session has another result now
    measurement: EntryMeasurement | None
    others: tuple[OtherSolver, ...]  #: other solvers, the fastest first
    history: tuple[EntryInVersion, ...]
    reproduce: str  #: command line that measures again; empty: the library is not installed
    #: true if the command measures this very candidate; false if it tunes anew
    same_candidate: bool

    def lines(self) -> list[str]:
        """The evidence as lines of text."""
        found = []
        if self.measurement and (line := self.measurement.line()):
            found.append(f"  measured    {line}")
        faster = [one for one in self.others if one.margin < 0]
        slower = [one for one in self.others if one.margin >= 0]
        found.append(f"  place       {len(faster) + 1} of {len(self.others) + 1} solvers")
        found += [f"  fastest     {one.line()}" for one in faster[:1]]
        found += [f"  runner-up   {one.line()}" for one in slower[:_SHOWN]]
        found += [f"  {one.line()}" for one in self.history]
        if self.reproduce:
            found.append(f"  {'repeat' if self.same_candidate else 'anew'}: {self.reproduce}")
        return found


class _Layer(NamedTuple):
    arch: str
    num_cu: int
    config_id: int


_OF_ROW = (
    *("id", *_Layer._fields, "session_id", "solver_id", "solver", "time_ms", "params", "source"),
    *("job_id", "final_job_id", "trial_number", "present_params", "times_ms", "low_ms", "high_ms"),
    *("library", "json", "config_key", "target", "conditions"),
)


def read_evidence(
    connection: sa.Connection, subject: Version, ids: Sequence[int]
) -> dict[int, Evidence]:
    """The evidence for entries of the version."""
    release = entries_of(subject)
    of_them = sa.select(GoldenEntry.config_id).where(GoldenEntry.id.in_(ids))
    configs = set(connection.execute(of_them).scalars())
    query = release.select(*_OF_ROW).where(release["config_id"].in_(configs))
    beside: dict[_Layer, list[Any]] = defaultdict(list)
    rows: dict[int, Any] = {}
    for row in connection.execute(query.order_by(release["time_ms"], release["id"])):
        beside[_layer(row)].append(row)
        rows[row.id] = row
    rows = {key: rows[key] for key in ids}
    measured = {key: row for key, row in rows.items() if _is_measured(row)}
    drifts = _drifts(connection, set(map(_measured_by, measured.values())))
    history = _history(connection, subject.library, configs)
    same, anew = _commands(connection, rows, measured)
    return {
        key: Evidence(
            _measurement(row, drifts) if key in measured else None,
            tuple(_other(row, other) for other in beside[_layer(row)] if other.id != key),
            tuple(history(_layer(row), row.solver_id)),
            same.get(key) or anew.get(key, ""),
            key in same,
        )
        for key, row in rows.items()
    }


def _layer(row: Any) -> _Layer:
    return _Layer(row.arch, row.num_cu, row.config_id)


def _is_measured(row: Any) -> bool:
    """True if the session still has the result that the entry was taken from, and measured it."""
    return row.job_id is not None and not row.source and row.present_params == row.params


def _measured_by(row: Any) -> int:
    """The job that its time is from: finals, or the solver's own."""
    return int(row.final_job_id or row.job_id)


def _measurement(row: Any, drifts: Mapping[int, float | None]) -> EntryMeasurement:
    times = json.loads(row.times_ms) if row.times_ms else []
    return EntryMeasurement(
        row.low_ms, row.high_ms, spread_of(times), drifts.get(_measured_by(row))
    )


def _other(row: Any, other: Any) -> OtherSolver:
    intervals = (row.low_ms, row.high_ms, other.low_ms, other.high_ms)
    apart = None
    if None not in intervals and _is_measured(row) and _is_measured(other):
        apart = row.high_ms < other.low_ms or other.high_ms < row.low_ms
    margin = other.time_ms / row.time_ms - 1
    low_ms, high_ms = (other.low_ms, other.high_ms) if _is_measured(other) else (None, None)
    return OtherSolver(other.id, other.solver, other.time_ms, low_ms, high_ms, margin, apart)


def _drifts(connection: sa.Connection, jobs: Collection[int]) -> dict[int, float | None]:
    """The drift of the device in the last good attempt of each job."""
    row = StepResultRow
    query = sa.select(row.job_id, row.drift).where(row.job_id.in_(jobs), row.ok, row.device != "")
    return {found.job_id: found.drift for found in connection.execute(query.order_by(row.id))}


def _history(connection: sa.Connection, library: str, configs: Collection[int]) -> Any:
    """Return a function of a layer and a solver's id that yields what each version has."""
    versions = of_library(connection, library)
    row = GoldenEntry
    query = sa.select(row.golden_id, *(getattr(row, name) for name in _Layer._fields))
    query = query.add_columns(row.solver_id, row.id, row.time_ms, SolverRow.name)
    query = query.join(SolverRow, SolverRow.id == row.solver_id).where(
        row.config_id.in_(configs), row.golden_id.in_([gold.id for gold in versions])
    )
    by_layer: dict[tuple[int, _Layer], list[Any]] = defaultdict(list)
    for entry in connection.execute(query.order_by(row.time_ms, row.id)):
        by_layer[entry.golden_id, _layer(entry)].append(entry)

    def of(layer: _Layer, solver_id: int) -> Iterable[EntryInVersion]:
        for gold in versions:
            entries = by_layer.get((gold.id, layer), [])
            match = next((entry for entry in entries if entry.solver_id == solver_id), None)
            first = entries[0] if entries else None
            yield EntryInVersion(
                *(gold.version, gold.state.value, gold.promoted_at, gold.promoted_by, gold.note),
                *((match.id, match.time_ms) if match else (None, None)),
                *((first.name, first.time_ms) if first else (None, None)),
            )

    return of


def _has_step(name: str, step: str) -> bool:
    """True if the library is installed, and still has the step."""
    library = find_library(name)
    return library is not None and step in {one.name for one in every_step(library)}


def _commands(
    connection: sa.Connection, rows: Mapping[int, Any], measured: Mapping[int, Any]
) -> tuple[dict[int, str], dict[int, str]]:
    """The commands that repeat measurements, and those that measure the solvers of the others
    anew."""
    attempts = last_good_attempts(connection, {row.job_id for row in measured.values()})
    repeated = {
        key: Repeated(row.job_id, attempts[row.job_id].step, row.trial_number)
        for key, row in measured.items()
        if row.job_id in attempts and _has_step(row.library, attempts[row.job_id].step)
    }
    made = commands(connection, repeated.values())
    same = {key: made[request] for key, request in repeated.items() if request in made}
    anew = {}
    for key, row in rows.items():
        library = find_library(row.library)
        if key not in same and library is not None:
            item = WorkItem(
                job_id=0,
                attempt=0,
                session_id=row.session_id,
                library=row.library,
                step=library.steps[-1].name,
                solver=row.solver,
                config=json.loads(row.json or "{}"),
                target=row.target,
                conditions=row.conditions or {},
                seed=seed(row.config_key, row.solver),
            )
            anew[key] = item_command(library, item)
    return same, anew
