"""Proposals of the next candidates from the measured ones: by a cost model, whose best points are
found by evolution where the space is large. Same history, same seed: same batch, in every
process."""

from __future__ import annotations

import hashlib
import itertools
from abc import ABC, abstractmethod
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from random import Random
from typing import Literal

from tuna.configs import Config
from tuna.libraries.kernels import Known, Past
from tuna.libraries.search.cost_model import CostModel, Features, in_order, learn

#: Decisions of a candidate as whole numbers, whose meaning is the space's own affair
Point = tuple[int, ...]
#: Function that returns the predicted costs of points, in their order: the smaller, the better
Costs = Callable[[Sequence[Point]], Sequence[float]]

_POPULATION = 512
_GENERATIONS = 5
#: Number of the history's fastest candidates from which each search starts
_PARENTS = 64
#: Share of a generation that is crossed; the others are mutated
_CROSSED = 0.15

#: Way of choosing candidates; `random` and `exhaustive` choose by chance, and differ in when a
#: search ends
Strategy = Literal["search", "random", "exhaustive"]

#: Maximum of points in a space that is ranked whole; larger ones are bred
SMALL = 4096
#: Minimum of trials with a time for a model to be trained on; until then the space's prior chooses,
#: or chance
_MIN_TIMED = 8
#: Number of the same problem's fastest candidates in earlier searches that are measured again
_AGAIN = 4
#: Share of a batch that is random, so that a wrong model gets trials outside of its choice
_RANDOM_SHARE = 0.1
#: Maximum of decisions in which a point that is near to another differs
_NEAR = 2
#: Cost that a candidate of a batch from a space that is ranked whole gets for each one before it
#: that differs in one decision, and in two, as the logarithm of a slowdown. Without it a batch has
#: the variants of one candidate.
_ALIKE = {1: 0.05, 2: 0.017}
#: Number of points that are drawn for each candidate before a space counts as exhausted
_DRAWS = 50
#: Number of points that are drawn for each candidate where only the prior chooses, which cannot
#: tell the very best
_BLIND_DRAWS = 16
#: Part of its effort by which a candidate must be faster: where only the prior chooses, and where
#: its own trials do
_BLIND_EFFORT, _EFFORT = 0.5, 0.15


class Space(ABC):
    """The candidates of one solver for one problem. Equal problems have equal spaces, in every
    process."""

    #: cost model that was trained on other problems: it chooses until there are trials, which then
    #: correct it
    prior: bytes | None = None
    #: points that are proposed before all others, such as a known default. Points that chance
    #: chooses in a small space are near to them in one half.
    begins_with: Sequence[Point] = ()

    @abstractmethod
    def points(self) -> Iterator[Point]:
        """All points in a fixed order."""

    @abstractmethod
    def size(self) -> int:
        """About how many points there are; exact where it is at most `search.proposal.SMALL`."""

    @abstractmethod
    def point_of(self, params: str) -> Point | None:
        """The point that a candidate is; None for params of another space."""

    @abstractmethod
    def params_of(self, point: Point) -> str | None:
        """The candidate's params, from which alone it can be built; None for a point that is no
        valid candidate."""

    @abstractmethod
    def features(self, point: Point) -> Features:
        """Return the features of a point for a cost model. A name means the same in the spaces of
        similar problems."""

    def effort(self, point: Point) -> float:
        """The natural logarithm of what a candidate takes to build over what most take, as far as
        its point tells."""
        return 0.0

    @abstractmethod
    def features_of(self, params: str, config: Config | None = None) -> Features | None:
        """Return the features of a candidate of this problem or a similar one, whose config is
        given where it is known; None if the params do not have them."""

    @abstractmethod
    def random(self, chance: Random) -> Point:
        """Return a random point."""

    @abstractmethod
    def mutated(self, point: Point, chance: Random) -> Point:
        """The point with one decision changed."""

    @abstractmethod
    def crossed(self, one: Point, other: Point, chance: Random) -> Point:
        """A point with some decisions of each; `one` itself where the two have too little in
        common."""


def propose(
    space: Space,
    history: Sequence[Past],
    *,
    count: int,
    seed: int,
    strategy: Strategy = "search",
    others: Sequence[Known] = (),
    prior: bytes | None = None,
) -> list[str]:
    """The params of up to `count` different candidates, none of which is in `history`; fewer: the
    space is exhausted.

    `others`: trials of earlier searches to learn from too. Of those of the same problem the fastest
    few are proposed again, so that they are measured here, and the others with a time are not.
    `prior`: instead of the space's own.
    Raises LibraryMissing where a model is needed and xgboost is not installed.
    """
    prior = prior or space.prior
    trials = in_order(history)
    taken = {trial.params for trial in history}
    chance = Random(_digest(seed, taken))  # noqa: S311  # must be repeatable
    chosen = _new(space, space.begins_with, count, taken)
    taken |= set(chosen)
    if strategy == "search":
        known = in_order(trial for source in others if source.same for trial in source.trials)
        timed = sorted(
            (trial.time_ms, trial.params) for trial in known if trial.time_ms is not None
        )
        chosen += _new(space, _points(space, timed[:_AGAIN]), count - len(chosen), taken)
        taken |= {params for _, params in timed}
        learned = in_order([*trials, *known])
        sources = [Known("", learned), *(source for source in others if not source.same)]
        wanted = count - len(chosen)
        ranked: Iterable[Point] = ()
        if wanted and _suffice(space, trials, others):
            model = CostModel(learn(space.features_of, sources, prior=prior), prior)
            ranked = _ranked(space, _costs(space, model, _EFFORT), learned, chance, taken)
        elif wanted and prior:
            ranked = _expected(
                space, _costs(space, CostModel(prior), _BLIND_EFFORT), chance, wanted
            )
        chosen += _new(space, ranked, wanted - round(wanted * _RANDOM_SHARE), taken | set(chosen))
    return [
        *chosen,
        *_new(space, _drawn(space, chance, count), count - len(chosen), taken | set(chosen)),
    ]


def _points(space: Space, timed: Iterable[tuple[float, str]]) -> Iterator[Point]:
    """Return the points of these params."""
    points = (space.point_of(params) for _, params in timed)
    return (point for point in points if point is not None)


def _suffice(space: Space, trials: Sequence[Past], others: Sequence[Known]) -> bool:
    """Whether there is enough to learn from: own trials, or others' in which features can be
    seen."""
    if sum(trial.time_ms is not None for trial in trials) >= _MIN_TIMED:
        return True
    timed = (
        space.features_of(trial.params, source.config)
        for source in others
        for trial in source.trials
        if trial.time_ms is not None
    )
    return len(list(itertools.islice(filter(None, timed), _MIN_TIMED))) == _MIN_TIMED


def _costs(space: Space, model: CostModel, effort: float) -> Costs:
    """The slowdown that the model predicts, and this share of the effort."""

    def costs(points: Sequence[Point]) -> list[float]:
        slowdowns = model.slowdowns([space.features(point) for point in points]).tolist()
        return [
            slow + effort * space.effort(point)
            for slow, point in zip(slowdowns, points, strict=True)
        ]

    return costs


def _ranked(
    space: Space, costs: Costs, trials: Sequence[Past], chance: Random, taken: Collection[str]
) -> Iterable[Point]:
    """Points by what they are expected to cost, the cheapest first; of a small space without those
    taken."""
    if space.size() > SMALL:
        return evolved(space, costs, trials, chance)
    points, known = list(space.points()), {space.point_of(params) for params in taken}
    chance.shuffle(points)  # trees give many points the same
    return _different([point for point in points if point not in known], costs)


def _different(points: Sequence[Point], costs: Costs) -> Iterator[Point]:
    """Points, the cheapest first, each of which makes those that are like it dearer."""
    cost = dict(zip(points, costs(points), strict=True))
    while cost:
        best = min(cost, key=cost.__getitem__)
        del cost[best]
        yield best
        for point in cost:
            cost[point] += _ALIKE.get(_differences(point, best), 0.0)


def _differences(one: Point, other: Point) -> int:
    """Return the number of decisions that differ."""
    return sum(mine != theirs for mine, theirs in itertools.zip_longest(one, other))


def _expected(space: Space, costs: Costs, chance: Random, count: int) -> Sequence[Point]:
    """Points by chance, the cheapest first."""
    points = list(
        dict.fromkeys(itertools.islice(_drawn(space, chance, count), _BLIND_DRAWS * count))
    )
    cost = dict(zip(points, costs(points), strict=True))
    return sorted(points, key=cost.__getitem__)


def _drawn(space: Space, chance: Random, count: int) -> Iterator[Point]:
    if space.size() > SMALL:
        return (space.random(chance) for _ in range(count * _DRAWS))
    points = list(space.points())
    chance.shuffle(points)
    near = [point for point in points if _is_near(point, space.begins_with)]
    turns = itertools.zip_longest(near, points)
    return (point for turn in turns for point in turn if point is not None)


def _is_near(point: Point, others: Iterable[Point]) -> bool:
    return any(_differences(point, other) <= _NEAR for other in others)


def _new(space: Space, points: Iterable[Point], count: int, taken: Collection[str]) -> list[str]:
    """The params of the first `count` valid points that are not taken."""
    found: dict[str, None] = {}
    made = (space.params_of(point) for point in points)
    fresh = (params for params in made if params is not None and params not in taken)
    while len(found) < count:
        more = list(itertools.islice(fresh, count - len(found)))
        if not more:
            break
        found |= dict.fromkeys(more)
    return list(found)


def _digest(seed: int, taken: Iterable[str]) -> int:
    """A seed that is another one after each round: the draws of earlier rounds need not be made
    again."""
    text = "\n".join([str(seed), *sorted(taken)])
    return int.from_bytes(hashlib.sha256(text.encode()).digest()[:8], "big")


def evolved(space: Space, costs: Costs, trials: Sequence[Past], chance: Random) -> Sequence[Point]:
    """All points that were met, the cheapest first. `trials` in the order of `in_order`."""
    timed = sorted((trial.time_ms, trial.params) for trial in trials if trial.time_ms is not None)
    known = [space.point_of(params) for _, params in timed[:_PARENTS]]
    population = [point for point in known if point is not None]
    population += [space.random(chance) for _ in range(_POPULATION - len(population))]
    cost: dict[Point, float] = {}
    for _ in range(_GENERATIONS):
        new = [point for point in dict.fromkeys(population) if point not in cost]
        cost.update(zip(new, costs(new), strict=True))
        parents = _sorted(cost, chance)[: _POPULATION // 4]
        population = [_child(space, parents, chance) for _ in range(_POPULATION)]
    return _sorted(cost, chance)


def _sorted(cost: Mapping[Point, float], chance: Random) -> list[Point]:
    """Trees give many points the same; among those chance decides."""
    points = list(cost)
    chance.shuffle(points)
    return sorted(points, key=cost.__getitem__)


def _child(space: Space, parents: Sequence[Point], chance: Random) -> Point:
    """Return a new point from parents in the order of their rank, of which the better ones are
    drawn more often."""
    first = parents[min(chance.randrange(len(parents)), chance.randrange(len(parents)))]
    if chance.random() < _CROSSED:
        return space.crossed(first, chance.choice(parents), chance)
    return space.mutated(first, chance)
