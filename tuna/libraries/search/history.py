"""What a search knows: trials of the problem that is searched, and of others like it."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass


@dataclass(frozen=True)
class Measured:
    """One trial: a candidate by its params, and its time or why it has none."""

    params: str
    seconds: float | None
    cause: str | None = None


def in_order(history: Iterable[Measured]) -> Sequence[Measured]:
    """The trials sorted by params, one for each; of several trials of one candidate the fastest.

    So what is learned does not depend on the order in which they were measured.
    """
    best: dict[str, Measured] = {}
    for trial in history:
        known = best.get(trial.params)
        if known is None or _key(trial) < _key(known):
            best[trial.params] = trial
    return [best[params] for params in sorted(best)]


def _key(trial: Measured) -> tuple[float, str]:
    return (float("inf") if trial.seconds is None else trial.seconds, trial.cause or "")
