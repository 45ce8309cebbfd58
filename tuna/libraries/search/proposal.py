"""Proposals: what to try next, given what was measured. Same history, same seed: same batch, in every process."""

from __future__ import annotations

import hashlib
import itertools
from collections.abc import Collection, Iterable, Iterator, Sequence
from random import Random
from typing import Literal

from tuna.libraries.search.cost_model import CostModel, Source, learn
from tuna.libraries.search.evolution import evolved
from tuna.libraries.search.history import Measured, in_order
from tuna.libraries.search.space import Point, Space

Strategy = Literal["search", "random", "exhaustive"]

#: Spaces of at most so many points are ranked whole; larger ones are bred.
SMALL = 4096
#: Trials with a time before a model is trained on them; until then candidates are random.
_FEWEST = 8
#: Of a batch, how much is random, so that a model that errs meets what it does not know.
_RANDOM_SHARE = 0.1
#: Points that are drawn for each candidate wanted before a space counts as exhausted.
_DRAWS = 50


def propose(
    space: Space,
    history: Iterable[Measured],
    *,
    count: int,
    seed: int,
    strategy: Strategy = "search",
    model: bytes | None = None,
    avoid: Collection[str] = (),
) -> list[str]:
    """The params of up to `count` different candidates, none of which is in `history` or `avoid`; fewer: the space is exhausted.

    `model`: of `learn`, which may know trials of like problems; without it one is trained on `history`. `avoid`: candidates of
    rounds that are still being measured. Raises LibraryMissing where a model is needed and xgboost is not installed.
    """
    trials = in_order(history)
    taken = {trial.params for trial in trials} | set(avoid)
    chance = Random(_digest(seed, taken))  # noqa: S311  # must be repeatable
    if strategy == "exhaustive":
        return _new(space, space.points(), count, taken)
    found = _new(space, space.first(), count, taken) if strategy == "search" else []
    if (
        len(found) < count
        and strategy == "search"
        and (model is not None or sum(trial.seconds is not None for trial in trials) >= _FEWEST)
    ):
        trained = CostModel(model or learn(space.features_of, [Source("", trials)]))
        wanted = count - len(found)
        found += _new(
            space, _ranked(space, trained, trials, chance), wanted - round(wanted * _RANDOM_SHARE), taken | set(found)
        )
    return [*found, *_new(space, _drawn(space, chance, count), count - len(found), taken | set(found))]


def _ranked(space: Space, model: CostModel, trials: Sequence[Measured], chance: Random) -> Iterable[Point]:
    """Points by what the model says of them, the fastest first."""
    if space.size() > SMALL:
        return evolved(space, model, trials, chance)
    points = list(space.points())
    chance.shuffle(points)  # trees give many points the same
    slowdowns = model.slowdowns([space.features(point) for point in points]).tolist()
    return [points[index] for index in sorted(range(len(points)), key=slowdowns.__getitem__)]


def _drawn(space: Space, chance: Random, count: int) -> Iterator[Point]:
    if space.size() <= SMALL:
        points = list(space.points())
        chance.shuffle(points)
        return iter(points)
    return (space.random(chance) for _ in range(count * _DRAWS))


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
    """A seed that is another one after each round: the draws of earlier rounds need not be made again."""
    text = "\n".join([str(seed), *sorted(taken)])
    return int.from_bytes(hashlib.sha256(text.encode()).digest()[:8], "big")
