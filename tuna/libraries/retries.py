"""Retry policy after a failed attempt: one for each cause, which a library may replace."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from enum import Enum

from tuna.vocabulary import Cause


class Again(str, Enum):
    """Whether and where a failed attempt is repeated."""

    NEVER = "never"  #: permanent: a repetition would fail too
    CONFIRMED = "confirmed"  #: permanent once another worker has found the same, while there is one
    ANYWHERE = "anywhere"  #: on any worker
    ELSEWHERE = "elsewhere"  #: on another worker than the one that failed, while there is one


@dataclass(frozen=True)
class Retry:
    """Retry policy after a failed attempt."""

    again: Again = Again.ANYWHERE
    first_step: bool = False  #: go back to the job's first step: its artifact is lost
    #: Counts against TUNA_MAX_ATTEMPTS. Uncharged failures are charged after 20 in a row.
    charged: bool = True
    delay_s: float = 0.0  #: before the first repetition
    backoff: float = 2.0  #: factor by which the delay grows with each further failure
    max_delay_s: float = 600.0

    def wait_s(self, failures: int) -> float:
        """Seconds to wait before the attempt that follows `failures` failed ones (1 or more)."""
        if not self.delay_s:
            return 0.0
        try:
            return min(self.max_delay_s, self.delay_s * self.backoff ** (failures - 1))
        except OverflowError:
            return self.max_delay_s


#: The same code would be built and answer the same, if the machine is sound; a lost artifact is
#: compiled again; the rest is tried again, if possible elsewhere.
DEFAULT_RETRIES: Mapping[Cause, Retry] = {
    **{cause: Retry(Again.ELSEWHERE) for cause in Cause},
    Cause.DEVICE_LOST: Retry(Again.ELSEWHERE, charged=False),
    Cause.BUILD_ERROR: Retry(Again.CONFIRMED),
    Cause.WRONG_RESULT: Retry(Again.CONFIRMED),
    Cause.NOT_APPLICABLE: Retry(Again.NEVER),
    Cause.ARTIFACT_LOST: Retry(first_step=True),
}
