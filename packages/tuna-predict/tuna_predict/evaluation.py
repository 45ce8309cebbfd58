"""The error of a predictor on layers that it has not seen, beside other ways to order candidates.
Pure. All candidates of a layer are held out together, so none is judged by a trial of its layer."""

from __future__ import annotations

import math
import statistics
from collections import defaultdict
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass
from random import Random
from typing import Any

from tuna.configs.similarity import size_distance
from tuna.errors import BadInput
from tuna.libraries.search.cost_model import CostModel
from tuna_predict.predictor import PredictedTime, Predictor, Table, train

#: Parts that the layers are divided in; each is judged by a model of the others.
_PARTS = 10
_TRIED = (1, 8, 32)
_GAINED = 8
#: Random orders that a figure is the mean of, and orders among equal predictions.
_ORDERS = 20
#: Trials of a layer, with the best of which a predicted configuration is compared.
_TRIALS = 32
#: Shares of predictions of a time that are below and above the interval.
_BELOW = 0.05

#: Predicted cost of each candidate of a table; None: nothing is known of any.
Costs = Sequence[float] | None
#: Figures of one way to order candidates: `regret@8`, the time of the best of the first eight over
#: the best of all, and `ndcg@8`, 1 for the best order.
Figures = Mapping[str, float]


@dataclass(frozen=True)
class Answers:
    """Predictions for layers that were held out."""

    layers: int  #: held-out layers with a similar one and configurations that fit others
    measured: int  #: layers whose trials include the predicted configuration
    over_found: float  #: geometric mean: its time / best of 32 trials drawn by chance
    over_random: float  #: geometric mean: its time / time of one trial drawn by chance
    #: Factors of a predicted time between which nine of ten measured times are.
    low: float
    high: float


@dataclass(frozen=True)
class Evaluation:
    """Figures of layers that were held out."""

    layers: int
    ways: Mapping[str, Figures]  #: figures of each order: random, nearest, built-in, trained
    searched: int  #: layers with candidates that the built-in prior knows
    searched_ways: Mapping[str, Figures]  #: `ways` of the searched layers alone
    answers: Answers | None  #: None if no layer has a similar one

    @property
    def beats_nearest(self) -> bool:
        """Whether it may answer for layers that were never tuned."""
        return self.answers is not None and _better(self.ways, "nearest")

    @property
    def beats_built_in(self) -> bool:
        """Whether it is used in searches."""
        return self.searched > 0 and _better(self.searched_ways, "built-in")

    def as_json(self) -> dict[str, Any]:
        """Return all of it, JSON-serialisable."""
        verdicts = {"beats_nearest": self.beats_nearest, "beats_built_in": self.beats_built_in}
        return asdict(self) | verdicts


def _better(ways: Mapping[str, Figures], other: str) -> bool:
    return ways["trained"]["regret@8"] <= ways[other]["regret@8"]


def held_out(tables: Sequence[Table], seed: int) -> Iterator[tuple[list[Table], list[Table]]]:
    """Yield the tables of some layers, and those of all others, until each layer was held out."""
    keys = sorted({table.config.key for table in tables})
    Random(seed).shuffle(keys)  # noqa: S311  # must be repeatable
    for part in range(min(_PARTS, len(keys))):
        chosen = set(keys[part::_PARTS])
        yield (
            [table for table in tables if table.config.key in chosen],
            [table for table in tables if table.config.key not in chosen],
        )


def evaluate(tables: Sequence[Table], built_in: bytes | None, seed: int = 0) -> Evaluation:
    """Return the figures of usable tables."""
    ways: dict[str, list[Figures]] = defaultdict(list)
    searched: dict[str, list[Figures]] = defaultdict(list)
    prior = CostModel(built_in) if built_in else None
    seen = set(prior.header["features"]) if prior else set()
    answers = []
    for out, others in held_out(tables, seed):
        predictor = Predictor(train(others, seed), others)
        for table in out:
            known = prior is not None and any(not seen.isdisjoint(row) for row in table.rows)
            costs: dict[str, Costs] = {
                "random": None,
                "nearest": nearest(table, others, seed),
                "built-in": prior.slowdowns(table.rows).tolist() if prior and known else None,
                "trained": predictor.costs(table),
            }
            chance = f"{seed} {table.config.key} {table.environment}"
            for way, predicted in costs.items():
                regrets = figures(table, predicted, chance)
                ways[way].append(regrets)
                if known:
                    searched[way].append(regrets)
            answer = predictor.predict(table.config, table.arch) if table.times else None
            if answer is not None:
                answers.append((table, answer))
    if not ways:
        raise BadInput("There is nothing to evaluate.")
    return Evaluation(
        len(ways["random"]),
        {way: _mean(regrets) for way, regrets in ways.items()},
        len(searched["random"]),
        {way: _mean(regrets) for way, regrets in searched.items() if regrets},
        _answers(answers, seed),
    )


def _answers(predictions: Sequence[tuple[Table, PredictedTime]], seed: int) -> Answers | None:
    judged = [
        (table, answer, table.times[answer.solver, answer.name])
        for table, answer in predictions
        if (answer.solver, answer.name) in table.times
    ]
    if not judged:
        return None
    over_found, over_random, errors = [], [], []
    for table, answer, time_ms in judged:
        known = [candidate.time_ms or math.inf for candidate in table.candidates]
        chance = Random(f"{seed} {table.config.key}")  # noqa: S311  # must be repeatable
        bests = [min(chance.sample(known, min(_TRIALS, len(known)))) for _ in range(_ORDERS)]
        over_found.append(time_ms / statistics.geometric_mean(bests))
        over_random.append(time_ms / statistics.geometric_mean(table.times.values()))
        errors.append(time_ms / answer.time_ms)
    errors.sort()
    least = round(_BELOW * (len(errors) - 1))
    return Answers(
        len(predictions),
        len(judged),
        statistics.geometric_mean(over_found),
        statistics.geometric_mean(over_random),
        errors[least],
        errors[-1 - least],
    )


def nearest(table: Table, others: Sequence[Table], seed: int) -> Costs:
    """Return the times that the candidates have in the table of the nearest layer; what is not
    there costs what a model of that table alone predicts."""
    distances = [
        (distance, other.config.label, other.environment, other)
        for other in others
        if (distance := size_distance(table.config, other.config)) is not None
    ]
    if not distances:
        return None
    *_, other = min(distances, key=lambda one: one[:3])
    predicted: list[float] = CostModel(train([other], seed)).slowdowns(table.rows).tolist()
    for number, one in enumerate(table.candidates):
        if time_ms := other.times.get((one.solver, one.name)):
            predicted[number] = math.log(time_ms / other.best_ms)
    return predicted


def figures(table: Table, costs: Costs, chance: str) -> Figures:
    """Return the figures of the order by cost; of equal costs the mean of orders by chance."""
    order = Random(chance)  # noqa: S311  # must be repeatable
    numbers = list(range(len(table.candidates)))
    times = [one.time_ms for one in table.candidates]
    gains = [table.best_ms / time_ms if time_ms else 0.0 for time_ms in times]
    ideal = _gained(sorted(gains, reverse=True))
    found: dict[str, list[float]] = defaultdict(list)
    for _ in range(_ORDERS):
        order.shuffle(numbers)
        ranked = numbers if costs is None else sorted(numbers, key=costs.__getitem__)
        for tried in _TRIED:
            best = max(gains[number] for number in ranked[:tried])
            found[f"regret@{tried}"].append(1 / best if best else _FAILED)
        found[f"ndcg@{_GAINED}"].append(_gained([gains[number] for number in ranked]) / ideal)
    return {name: _mean_of(name)(values) for name, values in found.items()}


#: Regret of candidates all of which failed.
_FAILED = math.exp(5.0)


def _gained(gains: Sequence[float]) -> float:
    return sum(gain / math.log2(place + 2) for place, gain in enumerate(gains[:_GAINED]))


def _mean(found: Sequence[Figures]) -> Figures:
    return {name: _mean_of(name)([one[name] for one in found]) for name in found[0]}


def _mean_of(name: str) -> Callable[[Sequence[float]], float]:
    return statistics.geometric_mean if name.startswith("regret") else statistics.mean
