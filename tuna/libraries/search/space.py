"""A space of candidates as the search sees it: points to vary and to describe, the params that a
point becomes, and the trials of candidates."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from random import Random

#: Decisions of a candidate as whole numbers; what they mean is the space's own affair.
Point = tuple[int, ...]


class Space(ABC):
    """The candidates of one solver for one problem. Equal problems have equal spaces, in every
    process."""

    #: A cost model that was trained on other problems: it chooses until there are trials, and those
    #: say how they differ from it.
    prior: bytes | None = None

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
    def features(self, point: Point) -> Mapping[str, float]:
        """Return the features of a point for a cost model. A name means the same in the spaces of
        similar problems."""

    def effort(self, point: Point) -> float:
        """The natural logarithm of what a candidate takes to build over what most take, as far as
        its point tells."""
        return 0.0

    @abstractmethod
    def features_of(self, params: str) -> Mapping[str, float] | None:
        """Return the features of a candidate of this problem or a similar one; None if the params
        do not have them."""

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


@dataclass(frozen=True)
class KnownTrial:
    """One trial: a candidate by its params, and its time or why it has none."""

    params: str
    seconds: float | None
    cause: str | None = None


def in_order(history: Iterable[KnownTrial]) -> Sequence[KnownTrial]:
    """The trials sorted by params, one for each; of several trials of one candidate the fastest.

    So the model does not depend on the order of measurement.
    """
    best: dict[str, KnownTrial] = {}
    for trial in history:
        known = best.get(trial.params)
        if known is None or _key(trial) < _key(known):
            best[trial.params] = trial
    return [best[params] for params in sorted(best)]


def _key(trial: KnownTrial) -> tuple[float, str]:
    return (float("inf") if trial.seconds is None else trial.seconds, trial.cause or "")
