"""The content of a report as plain data: `queries` fills it from SQL, `html` shows it."""

from __future__ import annotations

import statistics
from dataclasses import asdict, dataclass
from datetime import datetime
from typing import Any


@dataclass(frozen=True)
class Header:
    """The session, its environment (every field, in order) and its time span."""

    session_id: int
    reason: str
    library: str
    device: str
    environment: tuple[tuple[str, str], ...]
    created_at: datetime
    first: datetime | None  #: start of the first step
    last: datetime | None  #: end of the last step
    simulated: int = 0  #: results that a stand-in timed


@dataclass(frozen=True)
class Point:
    """A measured trial in its layer's search: its number in order of measurement, its time, the best time so far."""

    number: int
    time_ms: float
    best_ms: float


@dataclass(frozen=True)
class SolverFigures:
    """What one solver reached for a layer; times and rates are None without a checked winner."""

    job_id: int
    solver: str
    state: str
    cause: str | None
    time_ms: float | None
    gflops: float | None
    times_slower: float | None  #: its time over that of the layer's best
    workspace_bytes: int | None
    params: str  #: of the winner, in the solver's own form; "" without one, or for a solver that has none
    trials: int
    failed: int


@dataclass(frozen=True)
class LayerFigures:
    """One layer: its solvers, fastest first and those without a winner last, and how the search went."""

    config_id: int
    label: str
    driver: str
    flops: int | None
    solvers: tuple[SolverFigures, ...]
    peak_share: float | None  #: of the measured fp32 peak of the device that the winner ran on
    peak_unknown: str  #: why `peak_share` is None
    trials: int
    failed: int
    median_ms: float | None  #: of the good trials
    points: tuple[Point, ...]
    no_winner: str  #: why there is no winner; "" if there is one

    @property
    def best(self) -> SolverFigures | None:
        """The fastest solver."""
        return self.solvers[0] if self.solvers and self.solvers[0].time_ms is not None else None

    @property
    def speed_up(self) -> float | None:
        """The median trial's time over the best time."""
        best = self.best
        return self.median_ms / best.time_ms if best and best.time_ms and self.median_ms else None


@dataclass(frozen=True)
class FailureFigures:
    """Failures of one cause with an example."""

    cause: str
    trials: int
    attempts: int  #: whole attempts at a step
    job_id: int
    layer: str
    solver: str
    output_tail: str
    reproduce: str


@dataclass(frozen=True)
class DeviceFigures:
    """How one device spent the time between its first and its last measurement."""

    name: str
    peak_gflops: float | None
    steps: int
    busy_s: float
    span_s: float

    @property
    def idle_share(self) -> float | None:
        """Part of the span in which it measured nothing; None if the span is not known."""
        return min(1.0, max(0.0, 1 - self.busy_s / self.span_s)) if self.span_s > 0 else None


@dataclass(frozen=True)
class ReportFigures:
    """All figures of a session."""

    header: Header
    layers: tuple[LayerFigures, ...]
    jobs: tuple[tuple[str, int], ...]  #: (state, number of jobs), most first
    failures: tuple[FailureFigures, ...]
    devices: tuple[DeviceFigures, ...]

    @property
    def trials(self) -> int:
        """All trials."""
        return sum(layer.trials for layer in self.layers)

    @property
    def failed(self) -> int:
        """Trials with a cause."""
        return sum(layer.failed for layer in self.layers)

    @property
    def with_winner(self) -> int:
        """Layers with a winner."""
        return sum(layer.best is not None for layer in self.layers)

    @property
    def wall_s(self) -> float | None:
        """From the first start of a step to the last end."""
        first, last = self.header.first, self.header.last
        return (last - first).total_seconds() if first and last else None

    @property
    def idle_share(self) -> float | None:
        """Idle part of the time of all devices together."""
        known = [device for device in self.devices if device.idle_share is not None]
        span = sum(device.span_s for device in known)
        return 1 - sum(min(device.busy_s, device.span_s) for device in known) / span if span else None

    @property
    def trials_per_minute(self) -> float | None:
        """Trials, good or failed, for each minute of wall time."""
        return self.trials * 60 / self.wall_s if self.wall_s and self.trials else None

    @property
    def mean_speed_up(self) -> float | None:
        """Geometric mean of the layers' speed-ups."""
        factors = [layer.speed_up for layer in self.layers if layer.speed_up]
        return statistics.geometric_mean(factors) if factors else None

    @property
    def peak_share(self) -> float | None:
        """Share of the peak over all layers that have one, each counted with its time."""
        known = [
            (layer.peak_share, layer.best.time_ms or 0.0) for layer in self.layers if layer.peak_share and layer.best
        ]
        total = sum(time for _, time in known)
        return sum(share * time for share, time in known) / total if total else None

    def as_json(self) -> dict[str, Any]:
        """All figures for programs: fields under their names, moments in ISO 8601, with what follows from them."""
        fields = asdict(self)
        for name in ("created_at", "first", "last"):
            moment: datetime | None = getattr(self.header, name)
            fields["header"][name] = moment.isoformat() if moment else None
        fields["header"]["environment"] = dict(self.header.environment)
        fields["jobs"] = dict(self.jobs)
        for layer, shown in zip(self.layers, fields["layers"], strict=True):
            shown["speed_up"] = layer.speed_up
        for device, shown in zip(self.devices, fields["devices"], strict=True):
            shown["idle_share"] = device.idle_share
        derived = ("trials", "failed", "with_winner", "wall_s", "idle_share", "mean_speed_up", "peak_share")
        return fields | {name: getattr(self, name) for name in derived}
