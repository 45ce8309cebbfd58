"""Compares a golden version or a session with a version.

A layer here is a config on a device model (architecture and number of compute units); its time is
that of its fastest solver.
"""

from __future__ import annotations

from collections import Counter, defaultdict
from dataclasses import dataclass, field, replace
from typing import Any, NamedTuple

import sqlalchemy as sa

from tuna.common.messages import counted
from tuna.db import networks
from tuna.golden import releasable
from tuna.golden.releasable import ResultSelection
from tuna.golden.versions import ReleaseEntry, Version, entries_of, find, read_entries
from tuna.results.selectable import Results

NO_MODEL = "(no model)"
TOTAL = "total"
#: Maximum of items in a list of the report
_MAX_ITEMS = 20
_MAX_PARAMS_CHARS = 60


@dataclass(frozen=True)
class ModelTally:
    """A model's layers counted by outcome. Times are sums over layers that both sides have, each
    times its weight."""

    name: str
    faster: int = 0
    slower: int = 0
    equal: int = 0
    new: int = 0
    missing: int = 0
    before_ms: float = 0.0
    after_ms: float = 0.0

    @property
    def ratio(self) -> float | None:
        """Time after divided by time before; None if there is nothing to compare."""
        return self.after_ms / self.before_ms if self.before_ms else None

    def as_json(self) -> dict[str, Any]:
        """All fields and the ratio."""
        return {**vars(self), "ratio": self.ratio}


@dataclass(frozen=True)
class Change:
    """A layer whose time changed."""

    before: ReleaseEntry
    after: ReleaseEntry

    @property
    def ratio(self) -> float:
        """Time after divided by time before."""
        return self.after.time_ms / self.before.time_ms

    def lines(self) -> list[str]:
        """Three lines of text."""
        a, b = self.after, self.before
        device = f"{a.arch} x {a.num_cu}"
        head = (
            f"{(self.ratio - 1) * 100:+8.2f} %  {a.layer}  {device}  {b.time_ms:.6g} ->"
            f" {a.time_ms:.6g} ms"
        )
        return [
            head,
            *(f"      {name} {_short(entry)}" for name, entry in (("before", b), ("after ", a))),
        ]

    def as_json(self) -> dict[str, Any]:
        """The ratio and all fields."""
        return {"ratio": self.ratio, **vars(self)}


@dataclass(frozen=True)
class PromotionReport:
    """A golden version, or a session's results, compared with another version."""

    library: str
    version: int | None  #: number of the version that is compared; None: a session is
    session_id: int | None
    against: int | None  #: number of the version to compare with; None: there is none
    total: ModelTally
    models: tuple[ModelTally, ...]
    regressions: tuple[Change, ...]  #: slower layers, the worst first
    gains: tuple[Change, ...]  #: faster layers, the best first
    #: changes of the fastest solver: before, after, number of layers
    solver_changes: tuple[tuple[str, str, int], ...]
    #: first few of the layers that only the other version has
    missing_layers: tuple[ReleaseEntry, ...]
    #: time over the other version's time of every slower layer, largest first
    slower_ratios: tuple[float, ...] = field(default=(), repr=False)
    #: number of the session's results that are not releasable and therefore not compared
    left_out: int = 0

    def lines(self) -> list[str]:
        """The report as lines of text."""
        other = f"version {self.against}" if self.against is not None else "nothing: it has no base"
        subject = (
            f"session {self.session_id}"
            if self.version is None
            else f"golden version {self.version}"
        )
        lines = [f"{subject} of {self.library} against {other}", ""]
        if self.left_out:
            lines[1:1] = [
                f"left out: {counted(self.left_out, 'result')} of the session that cannot become"
                " golden"
            ]
        lines.append(
            f"{'model':40} {'faster':>7} {'slower':>7} {'equal':>7} {'new':>7} {'missing':>7} "
            " weighted time"
        )
        lines += [_tally_line(tally) for tally in (*self.models, self.total)]
        for title, changes in (("worst regressions", self.regressions), ("best gains", self.gains)):
            if changes:
                lines += ["", f"{title}:", *(line for change in changes for line in change.lines())]
        if self.solver_changes:
            lines += ["", "changed fastest solvers:"]
            lines += [
                f"{count:7}  {before} -> {after}" for before, after, count in self.solver_changes
            ]
        if self.missing_layers:
            lines += ["", f"missing layers ({len(self.missing_layers)} of {self.total.missing}):"]
            lines += [
                f"      {entry.layer}  {entry.arch} x {entry.num_cu}"
                for entry in self.missing_layers
            ]
        return lines

    def as_json(self) -> dict[str, Any]:
        """All fields but the ratios of all slower layers."""
        solver_changes = [
            {"before": b, "after": a, "layers": count} for b, a, count in self.solver_changes
        ]
        document = {**vars(self), "solver_changes": solver_changes}
        del document["slower_ratios"]
        return document


class _SolverTime(NamedTuple):
    """The entry of a solver for a layer; the least one is the fastest, ties are broken by the
    name."""

    time_ms: float
    solver: str
    id: int


class _DeviceLayer(NamedTuple):
    """A config on a device model."""

    arch: str
    num_cu: int
    config_id: int


class _Side(NamedTuple):
    library: str
    rows: Results
    version: int | None
    session_id: int | None = None


def report(
    connection: sa.Connection, version: int, against: int | None = None, library: str | None = None
) -> PromotionReport:
    """Compare a version with its base, or with `against`. Raises NotFound."""
    subject = find(connection, version, library)
    number = subject.base_version if against is None else against
    other = None if number is None else find(connection, number, subject.library)
    return compare(connection, subject, other)


def report_session(
    connection: sa.Connection, session_id: int, version: int, library: str | None = None
) -> PromotionReport:
    """Compare a session's results with a version's entries for the session's device model.

    Raises NotFound, or BadInput when the session does not belong to `library`.
    """
    session = releasable.session(connection, session_id, library)
    environment = session.environment
    other = find(connection, version, environment.library)
    wanted = ResultSelection(session_id, allow_imported=True, allow_noisy=True)
    subject = _Side(environment.library, releasable.releasable(wanted), None, session_id)
    device = entries_of(other, environment.arch, environment.num_cu)
    found = _compare(connection, subject, _Side(other.library, device, other.version))
    return replace(found, left_out=releasable.refused(connection, wanted))


def compare(connection: sa.Connection, subject: Version, other: Version | None) -> PromotionReport:
    """Compare a version with another one, or with nothing."""
    sides = [
        _Side(one.library, entries_of(one), one.version)
        for one in (subject, other)
        if one is not None
    ]
    return _compare(connection, *sides)


def _compare(
    connection: sa.Connection, subject: _Side, other: _Side | None = None
) -> PromotionReport:
    after = _fastest(connection, subject.rows)
    before = _fastest(connection, other.rows) if other is not None else {}
    both = sorted(before.keys() & after.keys())
    lost = sorted(before.keys() - after.keys())
    ratios = {layer: after[layer].time_ms / before[layer].time_ms for layer in both}
    faster = sorted((layer for layer in both if ratios[layer] < 1), key=lambda one: ratios[one])
    slower = sorted((layer for layer in both if ratios[layer] > 1), key=lambda one: -ratios[one])
    shown = [*slower[:_MAX_ITEMS], *faster[:_MAX_ITEMS]]
    new = read_entries(connection, subject.rows, [after[layer].id for layer in shown])
    gone = [*shown, *lost[:_MAX_ITEMS]]
    old = {}
    if other is not None:
        old = read_entries(connection, other.rows, [before[layer].id for layer in gone])
    changes = {layer: Change(old[before[layer].id], new[after[layer].id]) for layer in shown}
    pairs = Counter(
        (before[x].solver, after[x].solver) for x in both if before[x].solver != after[x].solver
    )
    total, models = _tallies(connection, before, after)
    return PromotionReport(
        library=subject.library,
        version=subject.version,
        session_id=subject.session_id,
        against=other.version if other is not None else None,
        total=total,
        models=models,
        regressions=tuple(changes[layer] for layer in slower[:_MAX_ITEMS]),
        gains=tuple(changes[layer] for layer in faster[:_MAX_ITEMS]),
        solver_changes=tuple(
            (*pair, count) for pair, count in sorted(pairs.items(), key=lambda x: (-x[1], x[0]))
        ),
        missing_layers=tuple(old[before[layer].id] for layer in lost[:_MAX_ITEMS]),
        slower_ratios=tuple(ratios[layer] for layer in slower),
    )


def _fastest(connection: sa.Connection, results: Results) -> dict[_DeviceLayer, _SolverTime]:
    """The fastest entry of each layer."""
    fastest: dict[_DeviceLayer, _SolverTime] = {}
    query = results.select(*_DeviceLayer._fields, *_SolverTime._fields)
    for arch, num_cu, config_id, *values in connection.execute(query).all():
        layer, entry = _DeviceLayer(arch, num_cu, config_id), _SolverTime(*values)
        fastest[layer] = min(fastest.get(layer, entry), entry)
    return fastest


def _outcome(new: _SolverTime | None, old: _SolverTime | None) -> str:
    """The outcome of a comparison with the entry before; None: there is none."""
    if old is None or new is None:
        return "new" if old is None else "missing"
    if new.time_ms == old.time_ms:
        return "equal"
    return "faster" if new.time_ms < old.time_ms else "slower"


def _tallies(
    connection: sa.Connection,
    before: dict[_DeviceLayer, _SolverTime],
    after: dict[_DeviceLayer, _SolverTime],
) -> tuple[ModelTally, tuple[ModelTally, ...]]:
    weights = networks.occurrences(connection)
    counts: dict[str, Counter[str]] = defaultdict(Counter)
    times: dict[str, list[float]] = defaultdict(lambda: [0.0, 0.0])
    for layer in sorted(before.keys() | after.keys()):
        old, new = before.get(layer), after.get(layer)
        shares = weights.get(layer.config_id) or {NO_MODEL: 1}
        for name, weight in [*shares.items(), (TOTAL, sum(shares.values()))]:
            counts[name][_outcome(new, old)] += 1
            if old and new:
                times[name][0] += old.time_ms * weight
                times[name][1] += new.time_ms * weight
    tallies = {
        name: ModelTally(name, before_ms=times[name][0], after_ms=times[name][1], **outcomes)
        for name, outcomes in counts.items()
    }
    total = tallies.pop(TOTAL, ModelTally(TOTAL))
    names = sorted(tallies, key=lambda name: (name == NO_MODEL, name))
    return total, tuple(tallies[name] for name in names)


def _tally_line(tally: ModelTally) -> str:
    numbers = " ".join(
        f"{n:7}" for n in (tally.faster, tally.slower, tally.equal, tally.new, tally.missing)
    )
    times = f"{tally.before_ms:.6g} -> {tally.after_ms:.6g} ms"
    change = "" if tally.ratio is None else f"{times} ({(tally.ratio - 1) * 100:+.2f} %)"
    return f"{tally.name:40} {numbers}  {change}".rstrip()


def _short(entry: ReleaseEntry) -> str:
    more = "..." if len(entry.params) > _MAX_PARAMS_CHARS else ""
    params = entry.params[:_MAX_PARAMS_CHARS] + more
    number = f"#{entry.id} " if entry.version is not None else ""
    return f"{number}{entry.solver} [{params}]; {entry.origin}"
