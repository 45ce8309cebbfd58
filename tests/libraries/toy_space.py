"""A space for tests of the search: points of three numbers on a grid, whose time is known."""

from __future__ import annotations

import itertools
import json
from collections.abc import Iterator, Mapping
from random import Random

from tuna.configs import Config
from tuna.libraries.kernels import Past
from tuna.libraries.search.proposal import Point, Space

#: Points of which the third number is this are no candidates.
INVALID = 3


class Grid(Space):
    """`side` ** 3 points. Their times are about 1 s at the origin's opposite corner and less
    towards `optimum`."""

    def __init__(self, side: int, optimum: Point = (5, 2, 7)) -> None:
        self.side, self.optimum = side, optimum

    def points(self) -> Iterator[Point]:
        return itertools.product(range(self.side), repeat=3)

    def size(self) -> int:
        return int(self.side**3)

    def point_of(self, params: str) -> Point | None:
        found = json.loads(params)
        return tuple(found["at"]) if found["side"] == self.side else None

    def params_of(self, point: Point) -> str | None:
        return None if point[2] == INVALID else json.dumps({"at": point, "side": self.side})

    def features(self, point: Point) -> Mapping[str, float]:
        return {name: float(value) for name, value in zip("xyz", point, strict=True)}

    def features_of(self, params: str, config: Config | None = None) -> Mapping[str, float] | None:
        return self.features(tuple(json.loads(params)["at"]))

    def random(self, chance: Random) -> Point:
        return tuple(chance.randrange(self.side) for _ in range(3))

    def mutated(self, point: Point, chance: Random) -> Point:
        index = chance.randrange(3)
        return (*point[:index], chance.randrange(self.side), *point[index + 1 :])

    def crossed(self, one: Point, other: Point, chance: Random) -> Point:
        return tuple(chance.choice(pair) for pair in zip(one, other, strict=True))

    def time_ms(self, params: str) -> float:
        """A candidate's true time."""
        at = json.loads(params)["at"]
        return 0.001 * (
            1.0 + sum((here - best) ** 2 for here, best in zip(at, self.optimum, strict=True))
        )

    def measured(self, params: str) -> Past:
        """A candidate measured; those at one side fail."""
        failed = json.loads(params)["at"][0] == 0
        return Past(params, None, "run_error") if failed else Past(params, self.time_ms(params))
