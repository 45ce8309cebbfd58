"""The content of a report as plain data: `queries` fills it from SQL, `html` and the command line
show it."""

from __future__ import annotations

import statistics
from collections.abc import Iterable, Mapping
from dataclasses import asdict, dataclass, field, is_dataclass
from datetime import datetime
from typing import Any

from tuna.configs.values import DataType
from tuna.db.benchmarks import ModelTime
from tuna.db.searches import MET, Searches
from tuna.reports.totals import DeviceBusyTime

#: Name of a total that counts each layer of the session once
EACH_ONCE = "each layer once"
#: Maximum of networks with a total, those with the most layers in the session
_MAX_NETWORKS = 20
#: Operations of an NVIDIA multiprocessor's tensor cores in a cycle, for one of its fp32 cores, on
#: sm_80 and sm_90 (NVIDIA, "H100 Tensor Core GPU Architecture", table of throughputs)
_MATRIX_UNITS: Mapping[DataType | None, int] = {
    **dict.fromkeys((DataType.FP16, DataType.BF16), 16),
    **dict.fromkeys((DataType.INT8, DataType.FP8_E4M3, DataType.FP8_E5M2), 32),
}
#: Number of times that each network has each config: {network: {config id: count}}
Counts = Mapping[str, Mapping[int, int]]


def ordered(networks: Counts, configs: Iterable[int]) -> list[str]:
    """The networks by the number of these configs that they have, most first, then by name; those
    without any are left out."""
    ids = set(configs)
    shared = {name: len(ids & counts.keys()) for name, counts in networks.items()}
    return sorted(
        (name for name in shared if shared[name]), key=lambda name: (-shared[name], name)
    )[:_MAX_NETWORKS]


@dataclass(frozen=True)
class Against:
    """The session whose times this one is compared with."""

    session_id: int
    library: str
    library_version: str
    reason: str
    differences: tuple[str, ...] = ()  #: sentences that say why the comparison is not like for like


@dataclass(frozen=True)
class ReportHeader:
    """The session, its environment (every field, in order) and its time span."""

    session_id: int
    reason: str
    library: str
    device: str
    environment: tuple[tuple[str, str], ...]
    created_at: datetime
    first: datetime | None  #: start of the first step
    last: datetime | None  #: end of the last step
    simulated: int = 0  #: number of results that a stand-in timed
    noisy: int = 0  #: number of results that were measured while the machine was busy
    against: Against | None = None


@dataclass(frozen=True)
class CurvePoint:
    """A measured trial in its solver's search: its number in order of measurement, its time, the
    best time so far."""

    number: int
    time_ms: float
    best_ms: float
    trial: int = 0  #: index among the candidates of its job
    params: str = ""  #: params in one short line; "" in layers that get no curve
    round: int = 0  #: number of the round in its search; 0: the first, or no search


@dataclass(frozen=True)
class SolverFigures:
    """The best of one solver for a layer; times and rates are None without a checked winner."""

    job_id: int  #: id of the job; of a search, the round with the winner, else its first
    solver: str
    state: str
    cause: str | None
    time_ms: float | None
    gflops: float | None
    times_slower: float | None  #: time over the time of the layer's best
    workspace_bytes: int | None
    #: params of the winner, in the solver's own form; "" without a winner or params
    params: str
    trials: int
    failed: int
    params_short: str = ""  #: `params` in one line for people
    #: 95 % confidence interval of the median; None: too few repeats
    interval_ms: tuple[float, float] | None = None
    noisy: bool = False  #: true if the machine was busy during the measurement
    clock: str = ""  #: clock that timed it, "wall" or "cpu"; "" if that was not recorded
    baseline: bool = False  #: true for the library's default, before any tuning
    reproduce: str = ""  #: command that repeats the winner's measurement
    points: tuple[CurvePoint, ...] = ()  #: best times of its search
    early: int = 0  #: number of trials that ended early, far slower than the best
    #: number of other candidates with the winner's code, whose times are ties of its own
    ties: int = 0
    rounds: int = 0  #: number of rounds of its search; 0: the job does not search
    #: reason of the search's end, or known result that left nothing to do
    stopped: str = ""

    @property
    def spread(self) -> float | None:
        """Half the width of the interval over the time."""
        if self.interval_ms is None or not self.time_ms:
            return None
        return (self.interval_ms[1] - self.interval_ms[0]) / 2 / self.time_ms


@dataclass(frozen=True)
class OtherTime:
    """The best time of a layer in the session that this one is compared with."""

    solver: str
    time_ms: float
    #: 95 % confidence interval of this time over the best time
    gain_interval: tuple[float, float] | None = None
    noisy: bool = False  #: true if the machine was busy during the measurement


@dataclass(frozen=True)
class LayerFigures:
    """One layer: its solvers, fastest first, then baselines, then those without a winner, and how
    the search went."""

    config_id: int
    label: str
    driver: str
    kind: str
    flops: int | None
    solvers: tuple[SolverFigures, ...]
    #: share of the device's measured fp32 peak that the winner reaches, 0 to 1
    peak_share: float | None
    peak_unknown: str  #: reason why `peak_share` is None
    trials: int
    failed: int
    median_ms: float | None  #: median time of the good trials
    no_winner: str  #: reason why no solver won; "" if one did
    count: int = 1  #: number of times that the network has the layer; 0: it does not
    other: OtherTime | None = None

    @property
    def best(self) -> SolverFigures | None:
        """The fastest solver; a baseline only where nothing else has a time."""
        return self.solvers[0] if self.solvers and self.solvers[0].time_ms is not None else None

    @property
    def best_ms(self) -> float | None:
        """The time of the fastest solver."""
        return self.best.time_ms if self.best else None

    @property
    def untuned(self) -> SolverFigures | None:
        """The fastest of the library's defaults, measured like every other solver."""
        return next((solver for solver in self.solvers if solver.baseline and solver.time_ms), None)

    @property
    def gain_untuned(self) -> float | None:
        """The untuned time over the best time."""
        return _ratio(self.untuned.time_ms if self.untuned else None, self.best_ms)

    @property
    def gain_other(self) -> float | None:
        """The other session's time over the best time."""
        return _ratio(self.other.time_ms if self.other else None, self.best_ms)

    @property
    def speed_up(self) -> float | None:
        """The median trial's time over the best time."""
        return _ratio(self.median_ms, self.best_ms)


def _ratio(time_ms: float | None, best_ms: float | None) -> float | None:
    return time_ms / best_ms if time_ms and best_ms else None


@dataclass(frozen=True)
class FailureFigures:
    """Failures of one cause with an example."""

    cause: str
    trials: int
    attempts: int  #: number of whole attempts at a step
    job_id: int
    layer: str
    solver: str
    output_tail: str
    reproduce: str


@dataclass(frozen=True)
class DeviceFigures(DeviceBusyTime):
    """The use of the devices with one name, and how fast they can be."""

    peak_gflops: float | None = None
    #: origin of the peak: `fma` (a loop of multiply-adds), `gemm` (NumPy's, less than the peak),
    #: `own` (the library's word); "": not known
    peak_source: str = ""

    def as_json(self) -> dict[str, Any]:
        """All fields, JSON-serialisable."""
        return asdict(self) | {"idle_share": self.idle_share}


@dataclass(frozen=True)
class Steps:
    """Devices and times of the accepted attempts."""

    first: datetime | None
    last: datetime | None
    devices: tuple[DeviceFigures, ...]
    device_of_job: Mapping[int, str]

    def peak_gflops(self, job_id: int, data_type: DataType | None) -> float | None:
        """Return the peak of the device that measured the job, in the job's data type.

        It is measured in fp32; that of a GPU's matrix units is a multiple of it.
        """
        name = self.device_of_job.get(job_id, "")
        device = next((one for one in self.devices if one.name == name), None)
        if device is None or device.peak_gflops is None:
            return None
        times = _MATRIX_UNITS if device.peak_source == "device" else {}
        factor = {DataType.FP32: 1, **times}.get(data_type)
        return factor * device.peak_gflops if factor else None


@dataclass(frozen=True)
class TotalFigures:
    """Sums over the layers of a network, each as often as the network has it."""

    name: str
    layers: int  #: number of distinct layers with a winner
    missing: int  #: number of distinct layers without a winner, in this session or at all
    #: number of calls of layers with a winner, each counted as often as the network has it
    calls: int
    time_ms: float | None
    gflops: float | None
    peak_share: float | None
    untuned_layers: int  #: number of distinct layers whose untuned time is known
    #: sum of the untuned times over the sum of the best times of the same layers
    gain_untuned: float | None
    other_layers: int  #: number of distinct layers that the other session has too
    gain_other: float | None


@dataclass(frozen=True)
class ReportFigures:
    """All figures of a session."""

    header: ReportHeader
    layers: tuple[LayerFigures, ...]
    #: totals of each network with layers of the session; the first gives the layers' counts
    totals: tuple[TotalFigures, ...]
    jobs: tuple[tuple[str, int], ...]  #: state and number of its jobs, the most frequent first
    failures: tuple[FailureFigures, ...]
    devices: tuple[DeviceFigures, ...]
    searches: Searches = field(default_factory=Searches)
    #: times of the models that have layers of the session, the latest last
    models: tuple[ModelTime, ...] = ()

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
    def without_trial(self) -> int:
        """Layers that needed none, since a known result was as fast as was asked for."""
        return sum(layer.no_winner.startswith(MET) for layer in self.layers)

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
        busy = sum(min(device.busy_s, device.span_s) for device in known)
        return 1 - busy / span if span else None

    @property
    def trials_per_minute(self) -> float | None:
        """Trials, good or failed, for each minute of wall time."""
        return self.trials * 60 / self.wall_s if self.wall_s and self.trials else None

    @property
    def mean_gain_untuned(self) -> float | None:
        """Geometric mean of the layers' gains over untuned."""
        return _mean(layer.gain_untuned for layer in self.layers)

    @property
    def mean_gain_other(self) -> float | None:
        """Geometric mean of the layers' gains over the other session."""
        return _mean(layer.gain_other for layer in self.layers)

    @property
    def mean_speed_up(self) -> float | None:
        """Geometric mean of the layers' speed-ups over their median trials."""
        return _mean(layer.speed_up for layer in self.layers)

    @property
    def peak_share(self) -> float | None:
        """Share of the peak over all layers that have one, each counted with its time."""
        known = [(one.peak_share, one.best_ms or 0.0) for one in self.layers if one.peak_share]
        total = sum(time for _, time in known)
        return sum(share * time for share, time in known) / total if total else None

    def as_json(self) -> dict[str, Any]:
        """All figures for programs: fields under their names, moments in ISO 8601, with what
        follows from them."""
        fields: dict[str, Any] = _plain(self)
        for name in ("created_at", "first", "last"):
            moment: datetime | None = getattr(self.header, name)
            fields["header"][name] = moment.isoformat() if moment else None
        fields["header"]["environment"] = dict(self.header.environment)
        fields["jobs"] = dict(self.jobs)
        fields["models"] = [model.as_json() for model in self.models]
        for layer, shown in zip(self.layers, fields["layers"], strict=True):
            shown |= {
                name: getattr(layer, name) for name in ("speed_up", "gain_untuned", "gain_other")
            }
            shown["untuned_ms"] = layer.untuned.time_ms if layer.untuned else None
        fields["devices"] = [device.as_json() for device in self.devices]
        derived = (
            *("trials", "failed", "with_winner", "without_trial", "wall_s", "idle_share"),
            *("peak_share", "mean_gain_untuned", "mean_gain_other", "mean_speed_up"),
        )
        return fields | {name: getattr(self, name) for name in derived}


def _plain(value: Any) -> Any:
    """Dataclasses as dictionaries, as `asdict` says, which copies each of a report's many numbers
    besides."""
    if is_dataclass(value):
        return {name: _plain(getattr(value, name)) for name in value.__dataclass_fields__}
    return [_plain(one) for one in value] if isinstance(value, tuple) else value


def _mean(gains: Any) -> float | None:
    known = [gain for gain in gains if gain]
    return statistics.geometric_mean(known) if known else None
