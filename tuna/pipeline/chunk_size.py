"""How long items of a step take, and so how many of them share a message."""

from __future__ import annotations

import statistics
from collections import deque

from tuna.libraries.base import Step
from tuna.libraries.items import StepResult

#: A chunk of less work than this grows: the cost of its message and lease would count.
_LEAST_S = 2.0
#: To at most so many times the items that the step asks for.
_GROWTH = 4
#: A chunk of more work than this shrinks: its worker's loss would cost too much, and others would wait at the end.
_MOST_S = 60.0
#: Results before which the step's own wish counts, and the newest of which are looked at.
_ENOUGH, _LATEST = 20, 200


class ChunkSizer:
    """Seconds that the latest good items took, by session and step."""

    def __init__(self) -> None:
        self._seconds: dict[tuple[int, str], deque[float]] = {}

    def note(self, session_id: int, result: StepResult) -> None:
        """Remember how long a good result took."""
        if result.ok:
            times = self._seconds.setdefault((session_id, result.step), deque(maxlen=_LATEST))
            times.append(result.busy_s or result.ended_at - result.started_at)

    def chunk(self, session_id: int, step: Step) -> int:
        """Items of one chunk: many short ones, or a single long one."""
        times = list(self._seconds.get((session_id, step.name), ()))
        if len(times) < _ENOUGH:
            return step.chunk
        median_s = max(statistics.median(times), 1e-6)
        grown = max(step.chunk, min(_GROWTH * step.chunk, int(_LEAST_S / median_s)))
        return max(1, min(grown, int(_MOST_S / median_s)))
