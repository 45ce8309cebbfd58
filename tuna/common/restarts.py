"""When a process that has ended by itself is started again: one policy for all that Tuna keeps
running."""

from __future__ import annotations

from dataclasses import dataclass

#: Seconds before the first restart in a row; each later pause is twice as long, up to the maximum.
_FIRST_PAUSE_S, _MAX_PAUSE_S = 1.0, 32.0
#: Uptime after which the pauses start anew.
_RECOVERED_S = 600.0


@dataclass
class Restarts:
    """The restarts of one process, or of several of a kind."""

    max_in_a_row: int | None = None  #: None: unlimited
    ends: int = 0  #: Ends in a row, since a process last ran for long.

    def pause_s(self, lived_s: float) -> float:
        """Count an end after this uptime; return the seconds until the restart."""
        self.ends = 1 if lived_s >= _RECOVERED_S else self.ends + 1
        return min(_MAX_PAUSE_S, _FIRST_PAUSE_S * 2.0 ** min(self.ends - 1, 16))

    @property
    def are_over(self) -> bool:
        """Whether the process ended too often in a row to be started again."""
        return self.max_in_a_row is not None and self.ends > self.max_in_a_row
