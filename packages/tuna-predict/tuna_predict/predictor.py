"""A predictor: a cost model of the trials of many layers, and those layers' tables. It orders the
candidates of a search, and chooses for a layer that was never tuned the best known configuration of
the layers nearest to it. Pure: it sees no SQL and measures nothing."""

from __future__ import annotations

import json
import math
from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property

from tuna.configs import Config, TaskConfig, from_json
from tuna.configs.similarity import family, size_distance
from tuna.errors import BadInput
from tuna.libraries.kernels import Known, Past
from tuna.libraries.search.cost_model import CostModel, Features, learn

#: Layers, and trials with a time of each, that a predictor is trained from at least.
MIN_LAYERS, MIN_TRIALS = 5, 8
#: Layers that a prediction is made from, and the distance at which one counts a quarter.
_NEIGHBOURS, _QUARTER = 8, 0.35
#: What a configuration costs more that none of them has, as the logarithm of a slowdown: it is more
#: seldom in the space of the layer too.
_UNKNOWN = 1.0


_OF_ENVIRONMENT = ("environment", "arch", "device")


@dataclass(frozen=True)
class TimedCandidate:
    """A candidate of a layer, which was measured or has failed."""

    solver: str
    #: Name that equal candidates of other layers share; empty: it fits its own layer alone.
    name: str
    features: Features
    time_ms: float | None


@dataclass(frozen=True)
class Table:
    """All candidates of one layer in one environment, in a fixed order."""

    config: Config
    environment: str  #: key of the environment
    arch: str
    device: str
    candidates: Sequence[TimedCandidate]

    @cached_property
    def best_ms(self) -> float:
        """The time of the fastest."""
        return min(one.time_ms for one in self.candidates if one.time_ms)

    @cached_property
    def rows(self) -> Sequence[Features]:
        """The features of each candidate."""
        about = layer_features(self.config)
        return [_features(one, about) for one in self.candidates]

    @cached_property
    def times(self) -> Mapping[tuple[str, str], float]:
        """The times of candidates that fit other layers, by solver and name."""
        return {
            (one.solver, one.name): one.time_ms
            for one in self.candidates
            if one.name and one.time_ms
        }


def layer_features(config: Config) -> Features:
    """Return the logarithms of all whole numbers of a layer, or of the core of a task."""
    core = config.core if isinstance(config, TaskConfig) and config.core is not None else config
    numbers = {
        f"layer.{name}": math.log2(value)
        for name, value in core.to_json().items()
        if isinstance(value, int) and not isinstance(value, bool) and value > 0
    }
    return {**numbers, f"layer.{core.kind}": 1.0}


def _features(candidate: TimedCandidate, about: Features) -> Features:
    """A candidate that fits its own layer alone is seen as searches see it: without the layer."""
    if not candidate.name:
        return candidate.features
    return {**candidate.features, **about, f"solver.{candidate.solver}": 1.0}


def usable(tables: Iterable[Table]) -> list[Table]:
    """Return the tables that can be learned from, in a fixed order; raises BadInput for too few."""
    given = list(tables)
    timed = [sum(one.time_ms is not None for one in table.candidates) for table in given]
    found = [one for one, count in zip(given, timed, strict=True) if count >= MIN_TRIALS]
    layers = len({one.config.key for one in found})
    if layers < MIN_LAYERS:
        raise BadInput(
            f"A predictor needs {MIN_TRIALS} trials with a time of each of {MIN_LAYERS}"
            f" layers: there are {sum(timed)} trials with a time, and {layers} such layers."
        )
    return sorted(found, key=lambda one: (one.config.key, one.environment))


def write_tables(tables: Sequence[Table]) -> bytes:
    """Return all that is learned from tables, as JSON; the same tables give the same bytes."""
    rows = [
        {
            "config": one.config.to_json(),
            "environment": {name: getattr(one, name) for name in _OF_ENVIRONMENT},
            "candidates": [
                [each.solver, each.name, dict(sorted(each.features.items())), each.time_ms]
                for each in one.candidates
            ],
        }
        for one in tables
    ]
    return json.dumps(rows, separators=(",", ":"), sort_keys=True).encode()


def read_tables(document: bytes) -> list[Table]:
    """Return the tables that `write_tables` wrote."""
    return [
        Table(
            config=from_json(row["config"]),
            **row["environment"],
            candidates=[TimedCandidate(*values) for values in row["candidates"]],
        )
        for row in json.loads(document)
    ]


def train(tables: Sequence[Table], seed: int = 0) -> bytes:
    """Return the cost model of all candidates, as `cost_model.learn` makes it."""
    features: dict[str, Features] = {}
    known = []
    for number, table in enumerate(tables):
        trials = []
        for index, (one, row) in enumerate(zip(table.candidates, table.rows, strict=True)):
            cause = None if one.time_ms else "failed"
            trials.append(Past(f"{number} {index}", one.time_ms, cause))
            features[trials[-1].params] = row
        known.append(Known(f"{table.config.key} {table.environment}", trials))
    return learn(lambda params, _: features[params], known, seed=seed)


@dataclass(frozen=True)
class PredictedTime:
    """The configuration that is expected to be the fastest for a layer that was never tuned."""

    solver: str
    name: str
    time_ms: float
    nearest: Sequence[str]  #: labels of the layers that it is from


class Predictor:
    """A cost model of `train` with the tables that it is from."""

    def __init__(self, model: bytes, tables: Sequence[Table]) -> None:
        self._model = CostModel(model)
        self._alike: dict[object, list[Table]] = defaultdict(list)
        for table in tables:
            like = family(table.config)
            if like is not None and table.times:
                self._alike[like].append(table)

    def costs(self, table: Table) -> list[float]:
        """Return what each candidate of a table is expected to cost, without a look at its times:
        the logarithm of its time over the best's."""
        found: list[float] = self._model.slowdowns(table.rows).tolist()
        return found

    def predict(
        self, config: Config, arch: str | None = None, device: str = ""
    ) -> PredictedTime | None:
        """Return the best known configuration of the nearest layers, on an architecture and a
        device with this in its name; None without a similar layer."""
        near = self._nearest(config, arch, device)
        known = {
            (candidate.solver, candidate.name): candidate
            for _, table in near
            for candidate in table.candidates
            if (candidate.solver, candidate.name) in table.times
        }
        if not known:
            return None
        names, about = sorted(known), layer_features(config)
        slow = self._model.slowdowns([_features(known[name], about) for name in names]).tolist()
        costs = [
            cost + _UNKNOWN * sum(weight for weight, table in near if name not in table.times)
            for cost, name in zip(slow, names, strict=True)
        ]
        chosen = costs.index(min(costs))
        expected = sum(
            weight * math.log(table.best_ms * _flops_over(config, table.config))
            for weight, table in near
        )
        solver, name = names[chosen]
        labels = [table.config.label for _, table in near]
        return PredictedTime(solver, name, math.exp(expected + max(0.0, slow[chosen])), labels)

    def _nearest(self, config: Config, arch: str | None, device: str) -> list[tuple[float, Table]]:
        """The nearest similar layers but the layer itself, with weights of which the sum is 1."""
        neighbours = []
        for table in self._alike.get(family(config), ()):
            distance = size_distance(config, table.config)
            here = arch in (None, table.arch) and device.lower() in table.device.lower()
            if distance is not None and here:
                neighbours.append((distance, table.config.label, table.environment, table))
        neighbours.sort(key=lambda one: one[:3])
        weights = [1 / (1 + distance / _QUARTER) ** 2 for distance, *_ in neighbours[:_NEIGHBOURS]]
        total = sum(weights)
        return [(weight / total, one[3]) for weight, one in zip(weights, neighbours, strict=False)]


def _flops_over(config: Config, other: Config) -> float:
    return config.flops / other.flops if config.flops and other.flops else 1.0
