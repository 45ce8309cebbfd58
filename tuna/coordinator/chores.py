"""The clock of a coordinator: its periodic chores, and all else that it does only now and then."""

from __future__ import annotations

import contextlib
import math
import time
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, field

import structlog

log = structlog.get_logger(__name__)

#: Clock of all chores, in seconds
clock = time.monotonic
#: Seconds after which a chore that is due and did not run, because of others or of an outage, is
#: logged as overdue
_OVERDUE_S = 30.0


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


@dataclass(frozen=True)
class Chore:
    """Something periodic; its function may return how much it moved."""

    name: str
    every_s: float
    run: Callable[[], int | None]
    share: float = 1.0  #: maximum share of the time that it may take, 0 to 1
    throttle: Throttle = field(init=False, repr=False)

    def __post_init__(self) -> None:
        object.__setattr__(self, "throttle", Throttle(self.every_s, self.share))


class Chores:
    """Runs chores in their order, one after the other, and says which are overdue."""

    def __init__(self, chores: Iterable[Chore]) -> None:
        self.all = tuple(chores)

    def run_due(self) -> int:
        """Run those that are due; returns how much they moved."""
        moved = 0
        due = [chore for chore in self.all if chore.throttle.is_due]
        overdue = {chore.name: chore.throttle.late_s for chore in due}
        overdue = {name: late_s for name, late_s in overdue.items() if late_s >= _OVERDUE_S}
        for chore in due:
            with chore.throttle.running():
                moved += chore.run() or 0
        if overdue:  # once, after an outage, in which each attempt ends at the first of them
            late_s = max(overdue.values())
            log.warning("chores overdue", chores=", ".join(overdue), late_s=round(late_s, 1))
        return moved
