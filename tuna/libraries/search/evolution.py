"""Evolutionary search of a large space for points that are expected to cost little, without
building or measuring anything."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from random import Random

from tuna.libraries.search.history import Measured
from tuna.libraries.search.space import Point, Space

#: What is expected of points, in their order: the less, the better.
Costs = Callable[[Sequence[Point]], Sequence[float]]

_POPULATION = 512
_GENERATIONS = 5
#: The fastest candidates of the history, from which each search starts.
_PARENTS = 64
#: How many of a generation are crossed; the others are mutated.
_CROSSED = 0.15


def evolved(
    space: Space, costs: Costs, trials: Sequence[Measured], chance: Random
) -> Sequence[Point]:
    """All points that were met, the cheapest first. `trials` in the order of `in_order`."""
    timed = sorted((trial.seconds, trial.params) for trial in trials if trial.seconds is not None)
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
    """Of parents in the order of their rank: the better ones are drawn more often."""
    first = parents[min(chance.randrange(len(parents)), chance.randrange(len(parents)))]
    if chance.random() < _CROSSED:
        return space.crossed(first, chance.choice(parents), chance)
    return space.mutated(first, chance)
