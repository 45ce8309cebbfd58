"""The periodic chores of a coordinator."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass, field

import structlog

from tuna.common.clocks import Throttle

log = structlog.get_logger(__name__)

#: Seconds after which a chore that is due and did not run, because of others or of an outage, is
#: logged as overdue
_OVERDUE_S = 30.0


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
