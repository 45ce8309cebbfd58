"""The pace of work: how long items of a step take, by which chunks are sized and queued."""

from __future__ import annotations

import statistics
from collections import deque
from collections.abc import Collection
from typing import NamedTuple

from tuna.libraries.base import Step
from tuna.libraries.items import StepResult

#: Seconds below which a chunk grows: the overhead of its message and lease would show
_MIN_CHUNK_S = 2.0
#: Maximum size, as a multiple of the step's own chunk size
_GROWTH = 16
#: Seconds above which a chunk shrinks: losing its worker would cost too much, and other workers
#: would idle at the end
_MAX_CHUNK_S = 60.0
#: Number of results before which the step's own chunk size is used, and number of the latest
#: results that count
_MIN_RESULTS, _WINDOW = 20, 200
#: Mean seconds of each step's items at which only one chunk waits beside what runs, because a
#: process finds it within some milliseconds; weight of the latest item in that mean
_LONG_S, _WEIGHT = 1.0, 0.2
#: Mean seconds of all steps' items at which no chunk waits: the next one, chosen when one ends,
#: comes some 20 milliseconds later, and up to 100 where much goes on. That is 0.2 to 1 % of such a
#: chunk; one that waits makes few searches take 1 to 3 % longer (docs/scheduling.md).
_VERY_LONG_S = 10.0


class EndedStage(NamedTuple):
    """A good attempt, and how long it took."""

    session_id: int
    solver_id: int
    step: str
    seconds: float


class Pace:
    """Seconds that the latest items took, for each session and step, and what follows from them."""

    def __init__(self) -> None:
        self._seconds: dict[tuple[int, str], deque[float]] = {}
        self._average_s: dict[tuple[int, str], float] = {}
        #: latest results of all steps: step, and seconds of an item
        self._latest: deque[tuple[tuple[int, str], float]] = deque(maxlen=_WINDOW)

    def note(self, session_id: int, result: StepResult) -> None:
        """Remember how long a result took; sizes of chunks follow from good ones alone."""
        key, seconds = (
            (session_id, result.step),
            result.busy_s or result.ended_at - result.started_at,
        )
        before_s = self._average_s.get(key, seconds)
        self._average_s[key] = before_s + _WEIGHT * (seconds - before_s)
        self._latest.append((key, seconds))
        if result.ok:
            self._seconds.setdefault(key, deque(maxlen=_WINDOW)).append(seconds)

    def chunk_size(self, session_id: int, step: Step) -> int:
        """Return the items of one chunk: many short ones, or a single long one."""
        times = list(self._seconds.get((session_id, step.name), ()))
        if len(times) < _MIN_RESULTS:
            return step.chunk
        median_s = max(statistics.median(times), 1e-6)
        grown = max(step.chunk, min(_GROWTH * step.chunk, int(_MIN_CHUNK_S / median_s)))
        return max(1, min(grown, int(_MAX_CHUNK_S / median_s)))

    def queued_per_process(self, steps: Collection[tuple[int, str]]) -> int | None:
        """Return how many chunks may wait for each process beside what it runs, in a queue with
        these steps of sessions.

        None: as many as anywhere, for items are short. Before the first result of each process none
        waits.
        """
        known = [self._average_s[key] for key in steps if key in self._average_s]
        if not known:
            return 0
        latest = [seconds for key, seconds in self._latest if key in steps]
        # however short some are: each costs the same moment
        if latest and statistics.fmean(latest) >= _VERY_LONG_S:
            return 0
        return None if min(known) < _LONG_S else 1
