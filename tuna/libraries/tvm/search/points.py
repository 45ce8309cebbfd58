"""The space of a family of kernels: few points, the best by estimate first. Imports TVM."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from random import Random
from typing import Any

from tuna.libraries.search.space import Point, Space
from tuna.libraries.tvm import records
from tuna.libraries.tvm.kernels.families import text_of
from tuna.libraries.tvm.params import readable
from tuna.libraries.tvm.problems import Problem


class PointSpace(Space):
    """Points are (index in the family's space,)."""

    def __init__(self, problem: Problem, target: Any, first: str = "") -> None:
        """`first`: the text of a point to try before all others, if the space has it."""
        self._problem, self._target = problem, target
        self._module = problem.workload()
        self._indices = problem.indices(len(problem.family.space(problem.layer)), first)
        known = problem.family.space(problem.layer)
        self._facts = [known[index].to_json() for index in range(len(known))]
        self._by_text = {text_of(point): index for index, point in enumerate(known)}

    def first(self) -> Sequence[Point]:
        """All of them: their order is the family's estimate."""
        return list(self.points())

    def points(self) -> Iterator[Point]:
        """The best by estimate first."""
        return ((index,) for index in self._indices)

    def size(self) -> int:
        """Exact."""
        return len(self._indices)

    def point_of(self, params: str) -> Point | None:
        """By the text that a record has of its point."""
        index = self._by_text.get(readable(params))
        return None if index is None else (index,)

    def params_of(self, point: Point) -> str | None:
        """The record of the kernel's schedule."""
        return records.to_params(self._module, self._target, self._problem.candidate(point[0]))

    def features(self, point: Point) -> Mapping[str, float]:
        """The point's numbers, and its place in the order."""
        numbers = {
            name: float(value)
            for name, value in self._facts[point[0]].items()
            if isinstance(value, int | float)
        }
        return {**numbers, "place": float(point[0])}

    def features_of(self, params: str) -> Mapping[str, float] | None:
        """Of this problem's candidates only."""
        point = self.point_of(params)
        return None if point is None else self.features(point)

    def random(self, chance: Random) -> Point:
        """Any point."""
        return (chance.choice(self._indices),)

    def mutated(self, point: Point, chance: Random) -> Point:
        """Any point: so few are never bred."""
        return self.random(chance)

    def crossed(self, one: Point, other: Point, chance: Random) -> Point:
        """The first."""
        return one
