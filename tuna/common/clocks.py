"""When something that is done only now and then is due."""

from __future__ import annotations

import contextlib
import math
import time
from collections.abc import Iterator

#: Clock of all that is due, in seconds
clock = time.monotonic


class Throttle:
    """Says when something is due: at most every `every_s`, and for at most `share` of the time.

    At first it is due at once.
    """

    def __init__(self, every_s: float = 0.0, share: float = 1.0) -> None:
        self._every_s, self._share = every_s, share
        self._due_at = -math.inf

    @property
    def is_due(self) -> bool:
        """True if enough time has passed."""
        return clock() >= self._due_at

    @property
    def late_s(self) -> float:
        """Seconds since it became due; 0 before, and for the first time."""
        return max(0.0, clock() - self._due_at) if math.isfinite(self._due_at) else 0.0

    def wait(self, seconds: float) -> None:
        """Make it due in this many seconds."""
        self._due_at = clock() + seconds

    @contextlib.contextmanager
    def running(self) -> Iterator[None]:
        """Time what it throttles, which is due again at once if it fails."""
        began_s = clock()
        yield
        self._due_at = began_s + max(self._every_s, (clock() - began_s) / self._share)


class RateLimit:
    """Spaces what happens `every_s` apart on average; after a time with less, `burst` may follow
    each other at once."""

    def __init__(self, every_s: float, burst: int) -> None:
        self._every_s, self._burst = every_s, burst
        self._due_at = 0.0

    def wait(self) -> None:
        """Count one, and sleep until the next may begin."""
        now = clock()
        self._due_at = max(self._due_at, now - self._burst * self._every_s) + self._every_s
        time.sleep(max(0.0, self._due_at - now))
