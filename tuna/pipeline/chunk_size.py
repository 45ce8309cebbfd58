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


class ChunkSizer:
    """Chunk sizes by the seconds that the latest good items took, for each session and step."""

    def __init__(self) -> None:
        self._seconds: dict[tuple[int, str], deque[float]] = {}

    def note(self, session_id: int, result: StepResult) -> None:
        """Remember how long a good result took."""
        if result.ok:
            times = self._seconds.setdefault((session_id, result.step), deque(maxlen=_WINDOW))
            times.append(result.busy_s or result.ended_at - result.started_at)

    def chunk(self, session_id: int, step: Step) -> int:
        """Items of one chunk: many short ones, or a single long one."""
        times = list(self._seconds.get((session_id, step.name), ()))
        if len(times) < _MIN_RESULTS:
            return step.chunk
        median_s = max(statistics.median(times), 1e-6)
        grown = max(step.chunk, min(_GROWTH * step.chunk, int(_MIN_CHUNK_S / median_s)))
        return max(1, min(grown, int(_MAX_CHUNK_S / median_s)))
