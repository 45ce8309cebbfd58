"""When a search ends, and when it need not start: a pure function of its trials, its time and what
is known already."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from enum import Enum

#: The best is flat once it improved by less than `FLAT_GAIN` over the last trials: `FLAT_SHARE` of
#: them, and at least `FLAT_TRIALS`
FLAT_GAIN, FLAT_SHARE, FLAT_TRIALS = 0.01, 0.2, 32


class Effort(str, Enum):
    """Bound of a search that was given no other limit."""

    QUICK = "quick"  #: at most 64 trials
    FULL = "full"  #: at most 1,024 trials


_MAX_TRIALS: dict[Effort | None, int] = {Effort.QUICK: 64, Effort.FULL: 1024}


class Stop(str, Enum):
    """The rule that ended a search; of several that hold the first here."""

    TARGET = "target"  #: a result is as fast as was asked for
    EXHAUSTED = "exhausted"  #: the space has no candidate left
    TRIALS = "trials"  #: the trials that were allowed are done
    MINUTES = "minutes"  #: the time that was allowed is over
    FLAT = "flat"  #: the last trials improved nothing


@dataclass(frozen=True)
class SearchState:
    """State of a search, for its stop rule."""

    #: seconds of each trial in the order of rounds and candidates; None: failed
    seconds: Sequence[float | None] = ()
    #: seconds of the search's result, which was measured in fresh processes
    result_s: float | None = None
    elapsed_s: float = 0.0  #: seconds since the search started
    exhausted: bool = False  #: true if fewer candidates were proposed than asked for


@dataclass(frozen=True)
class StopRule:
    """Limits of a search; None: no such limit."""

    trials: int | None = None
    minutes: float | None = None
    target_ms: float | None = None
    until_flat: bool = False

    @classmethod
    def of(
        cls,
        effort: Effort | None = None,
        *,
        trials: int | None = None,
        minutes: float | None = None,
        target_ms: float | None = None,
    ) -> StopRule:
        """The rule of a command's options.

        An effort ends at its number of trials or when flat; it holds beside the other limits if it
        is given, and with a target alone: full, if none was given. Trials or
        minutes alone are used to the end.
        """
        if effort is None and trials is None and minutes is None:
            effort = Effort.FULL
        most = [limit for limit in (trials, _MAX_TRIALS.get(effort)) if limit is not None]
        return cls(min(most, default=None), minutes, target_ms, until_flat=effort is not None)

    def left(self, trials: int) -> int | None:
        """Return the number of trials that may still be proposed after `trials`; None: no limit."""
        return None if self.trials is None else max(0, self.trials - trials)

    def stopped_by(self, progress: SearchState) -> Stop | None:
        """Return the rule that ends the search now, None while it goes on."""
        result_s = math.inf if progress.result_s is None else progress.result_s
        if self.target_ms is not None and 1000.0 * result_s <= self.target_ms:
            return Stop.TARGET
        if progress.exhausted:
            return Stop.EXHAUSTED
        if self.left(len(progress.seconds)) == 0:
            return Stop.TRIALS
        if self.minutes is not None and progress.elapsed_s >= 60.0 * self.minutes:
            return Stop.MINUTES
        return Stop.FLAT if self.until_flat and is_flat(progress.seconds) else None


def is_flat(seconds: Sequence[float | None]) -> bool:
    """Whether the last trials hardly improved the best; also where there is still no trial with a
    time."""
    last = max(FLAT_TRIALS, math.ceil(FLAT_SHARE * len(seconds)))
    if len(seconds) <= last:
        return False
    before = min((time for time in seconds[:-last] if time is not None), default=math.inf)
    now = min((time for time in seconds if time is not None), default=math.inf)
    return now > (1.0 - FLAT_GAIN) * before or now == math.inf
