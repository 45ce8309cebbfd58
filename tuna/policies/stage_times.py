"""Predicts how long a stage takes: the median of the latest ones of its solver, with the error of
that."""

from __future__ import annotations

import statistics
from collections import deque
from dataclasses import dataclass

from tuna.policies.snapshot import StageKind

#: Latest durations that a prediction is made from.
_WINDOW = 200
#: A prediction is made anew when there are more durations by this factor, or by a quarter of the
#: window.
_GROWTH = 1.25


@dataclass(frozen=True)
class Prediction:
    """A duration in seconds, and how wrong it was for those that it was made from."""

    seconds: float
    error: float  #: median of |duration - seconds| / duration, such as 0.3
    durations: int  #: how many it was made from


class _Window:
    """The latest durations, and what is predicted from them."""

    def __init__(self) -> None:
        self._latest: deque[float] = deque(maxlen=_WINDOW)
        self._seen = self._due = 0
        self.prediction = Prediction(0.0, 0.0, 0)

    def note(self, seconds: float) -> bool:
        """Add a duration; returns whether the prediction changed."""
        self._latest.append(seconds)
        self._seen += 1
        if self._seen < self._due:
            return False
        self._due = min(int(self._seen * _GROWTH), self._seen + _WINDOW // 4) + 1
        median = statistics.median(self._latest)
        error = statistics.median(abs(one - median) / max(one, 1e-9) for one in self._latest)
        self.prediction = Prediction(median, error, len(self._latest))
        return True


class StageTimes:
    """Durations of ended stages by queue, solver and step."""

    def __init__(self) -> None:
        self._kinds: dict[StageKind, _Window] = {}
        self._steps: dict[tuple[str, str], _Window] = {}
        self.version = 0  #: changes when a prediction does

    def note(self, kind: StageKind, seconds: float) -> None:
        """Remember how long a stage took."""
        of_kind = self._kinds.get(kind)
        if of_kind is None:
            of_kind = self._kinds[kind] = _Window()
        of_step = self._steps.get((kind.queue, kind.step))
        if of_step is None:
            of_step = self._steps[kind.queue, kind.step] = _Window()
        changed = of_kind.note(seconds)
        if of_step.note(seconds) or changed:
            self.version += 1

    def predict(self, kind: StageKind) -> Prediction | None:
        """The next duration: by the solver, else by all solvers of the step there; None while
        nothing is known."""
        window = self._kinds.get(kind) or self._steps.get((kind.queue, kind.step))
        return window.prediction if window else None
