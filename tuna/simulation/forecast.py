"""Predictions of a simulated coordinator for the work that is left, and their errors."""

from __future__ import annotations

from array import array
from collections import defaultdict
from collections.abc import Sequence

from tuna.policies import StageKind, StageTimes
from tuna.simulation.jobs import Item, JobLine
from tuna.simulation.outcome import PredictionOutcome, prediction_outcome


class Forecast:
    """Predicted durations, and of what is left by session and queue, as a snapshot for a policy has
    them."""

    def __init__(self) -> None:
        self.predicted_s: dict[StageKind, float] = {}
        self.left_s: defaultdict[tuple[int, str], float] = defaultdict(float)
        self._times = StageTimes()
        self._made_of = -1  #: version of the times that the two were made of; -1: they are stale
        self._lines: dict[
            int, Sequence[JobLine]
        ] = {}  #: of sessions that arrived and have open jobs
        self._errors: dict[tuple[str, str], array[float]] = defaultdict(lambda: array("d"))

    def arrive(self, session_id: int, lines: Sequence[JobLine]) -> None:
        """A session came."""
        self._lines[session_id] = lines
        self.expire()

    def leave(self, session_id: int) -> None:
        """All jobs of a session ended."""
        self._lines.pop(session_id, None)
        self.expire()

    def expire(self) -> None:
        """Note that the work left changed by more than the ends of stages."""
        self._made_of = -1

    def start(self, item: Item) -> None:
        """A stage starts: predict when it will end."""
        prediction = self._times.predict(item.kind)
        item.predicted_s = prediction.seconds if prediction else 0.0

    def end(self, item: Item, ran_s: float) -> None:
        """A stage ended well after so long."""
        kind = item.kind
        if item.predicted_s and ran_s:
            self._errors[kind.queue, kind.step].append(abs(item.predicted_s - ran_s) / ran_s)
        self._times.note(kind, ran_s)

    def subtract(self, session_id: int, kind: StageKind) -> None:
        """One stage less is left."""
        if kind in self.predicted_s:
            self.left_s[session_id, kind.queue] -= self.predicted_s[kind]

    def refresh(self) -> None:
        """Predict all that is left anew, if predictions changed since; meanwhile what ends is
        subtracted."""
        if self._made_of == self._times.version:
            return
        self._made_of = self._times.version
        self.predicted_s, self.left_s = {}, defaultdict(float)
        for session_id, lines in self._lines.items():
            for line in lines:
                for kind, left in zip(line.kinds, line.left, strict=True):
                    if prediction := self._times.predict(kind):
                        self.predicted_s[kind] = prediction.seconds
                        self.left_s[session_id, kind.queue] += left * prediction.seconds

    def outcomes(self) -> tuple[PredictionOutcome, ...]:
        """The errors of its predictions by queue and step."""
        return tuple(
            prediction_outcome(queue, step, errors)
            for (queue, step), errors in sorted(self._errors.items())
        )
