"""Policies by the predicted duration of what is left of a session."""

from __future__ import annotations

from collections import defaultdict
from enum import IntEnum

from tuna.policies.snapshot import Need, OpenStep, Share, Snapshot, in_order, policy


@policy(Need.LEFT)
def shortest(snapshot: Snapshot) -> list[Share]:
    """A session's priority first, then what goes on in its queue, then the session that would end
    soonest alone.

    Of a session, later steps come first, then shorter ones.
    """
    left_s = _left_s(snapshot)

    def rank(step: OpenStep) -> tuple[float, ...]:
        seconds = snapshot.predicted_s.get(step.kind, 0.0)
        mine = (left_s[step.session_id], step.session_id, step.remaining, seconds, step.since_s)
        return -step.priority, not step.continues, *mine

    return in_order(snapshot, rank)


class _Chance(IntEnum):
    """Which deadlines come first."""

    KEPT = 0  #: it can still be kept
    #: even alone the session would end too late: it does not delay those that can be kept
    MISSED = 1
    NONE = 2


@policy(Need.LEFT)
def deadline(snapshot: Snapshot) -> list[Share]:
    """A session's priority first, then what goes on in its queue, then the earliest deadline that
    can still be kept.

    Then come deadlines that cannot be kept, then sessions without one, the one that was served
    longest ago first.
    """
    left_s = _left_s(snapshot)

    def rank(step: OpenStep) -> tuple[float, ...]:
        at_s = snapshot.deadline_s.get(step.session_id)
        if at_s is None:
            mine = (_Chance.NONE, snapshot.turn(step), step.remaining, step.since_s)
            return -step.priority, not step.continues, *mine
        chance = (
            _Chance.KEPT if snapshot.now_s + left_s[step.session_id] <= at_s else _Chance.MISSED
        )
        return -step.priority, not step.continues, chance, at_s, step.remaining, step.since_s

    return in_order(snapshot, rank)


def _left_s(snapshot: Snapshot) -> dict[int, float]:
    """By session: predicted seconds to its end if all processes worked for it alone, by its slowest
    queue."""
    found: dict[int, float] = defaultdict(float)
    for (session_id, queue), seconds in snapshot.left_s.items():
        found[session_id] = max(
            found[session_id], seconds / max(1, snapshot.processes.get(queue, 0))
        )
    return found
