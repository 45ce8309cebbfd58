"""Sizes chunks by how long items of a step take."""

from __future__ import annotations

import statistics
from collections import deque

from tuna.libraries.base import Step
from tuna.libraries.items import StepResult

#: A shorter chunk grows: the overhead of its message and lease would show.
_MIN_CHUNK_S = 2.0
#: Maximum size, as a multiple of the step's own chunk size.
_GROWTH = 16
#: A longer chunk shrinks: losing its worker would cost too much, and other workers would idle at the end.
_MAX_CHUNK_S = 60.0
#: Results before which the step's own chunk size is used, and size of the window of the latest ones.
_MIN_RESULTS, _WINDOW = 20, 200
#: Items that take so many seconds on average are long; weight of the latest one in that average.
_LONG_S, _WEIGHT = 1.0, 0.2


class ChunkSizer:
    """Chunk sizes by the seconds that the latest good items took, for each session and step."""

    def __init__(self) -> None:
        self._seconds: dict[tuple[int, str], deque[float]] = {}
        self._average_s: dict[tuple[int, str], float] = {}

    def note(self, session_id: int, result: StepResult) -> None:
        """Remember how long a result took; sizes of chunks follow from good ones alone."""
        key, seconds = (session_id, result.step), result.busy_s or result.ended_at - result.started_at
        before_s = self._average_s.get(key, seconds)
        self._average_s[key] = before_s + _WEIGHT * (seconds - before_s)
        if result.ok:
            self._seconds.setdefault(key, deque(maxlen=_WINDOW)).append(seconds)

    def chunk(self, session_id: int, step: Step) -> int:
        """Items of one chunk: many short ones, or a single long one."""
        times = list(self._seconds.get((session_id, step.name), ()))
        if len(times) < _MIN_RESULTS:
            return step.chunk
        median_s = max(statistics.median(times), 1e-6)
        grown = max(step.chunk, min(_GROWTH * step.chunk, int(_MIN_CHUNK_S / median_s)))
        return max(1, min(grown, int(_MAX_CHUNK_S / median_s)))

    def is_long(self, session_id: int, step: Step) -> bool | None:
        """Whether its latest items took a second or more on average, so that no chunk is short; None: nothing is known."""
        average_s = self._average_s.get((session_id, step.name))
        return None if average_s is None else average_s >= _LONG_S
