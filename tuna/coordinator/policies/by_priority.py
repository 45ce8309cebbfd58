"""Policies for production: sessions by priority first, then by the rule that names the policy."""

from __future__ import annotations

import math
from collections import defaultdict
from enum import IntEnum
from itertools import groupby

from tuna.coordinator.policies.snapshot import Need, Share, Snapshot, in_order, in_turn, policy
from tuna.jobs.open_steps import OpenStep, SearchProgress


@policy(Need.NOTHING)
def fair(snapshot: Snapshot) -> list[Share]:
    """In each queue a session's priority first, then what goes on there, then sessions in turn.

    Of a session, later steps come first, then what waits longest. Turns are counted in each queue
    for itself: a session that is often served by one is not last in the other.
    """
    shares: list[Share] = []
    for queue, steps in snapshot.by_queue().items():
        room = snapshot.room(queue)
        for _, rivals in groupby(sorted(steps, key=_rank), key=_rank):
            dealt = in_turn(_by_session(snapshot, list(rivals)), room)
            room -= sum(share.chunks for share in dealt)
            shares += dealt
            if not room:
                break
    return shares


def _by_session(snapshot: Snapshot, steps: list[OpenStep]) -> list[list[OpenStep]]:
    """The steps of each session, that of the first turn first."""
    lines: dict[int, list[OpenStep]] = {}
    for step in sorted(steps, key=lambda step: (step.remaining, step.since_s)):
        lines.setdefault(step.session_id, []).append(step)
    return sorted(lines.values(), key=lambda line: snapshot.turn(line[0]))


def _rank(step: OpenStep) -> tuple[int, bool]:
    return -step.priority, not step.continues


#: Share of the recent slope in the expected gain, and rounds over which it is taken: as in TVM
#: MetaSchedule's `GradientBased` task scheduler, which has them from Ansor (OSDI 2020, section 6)
_SLOPE_SHARE, _WINDOW = 0.2, 3


@policy(Need.PROGRESS | Need.ROUNDS)
def gradient(snapshot: Snapshot) -> list[Share]:
    """A session's priority first, then what goes on in its queue, then searches without any result,
    then by expected gain.

    The gain is that of a second of work, by the predicted duration of the step.
    """

    def rank(step: OpenStep) -> tuple[float, ...]:
        seconds = snapshot.predicted_s.get(step.kind, 1.0)
        gain = expected_gain_ms(step.progress) / max(seconds, 1e-9)
        return -step.priority, not step.continues, -gain, step.remaining, step.since_s

    return in_order(snapshot, rank)


def expected_gain_ms(progress: SearchProgress | None) -> float:
    """Milliseconds of a run of the model that the next round is expected to gain; infinite while
    results are missing."""
    if progress is None or not progress.rounds or not progress.best_ms:
        return math.inf
    times = progress.best_ms[-1 - _WINDOW :]
    optimistic = times[-1] / progress.rounds
    slope = (times[0] - times[-1]) / (len(times) - 1) if len(times) > 1 else optimistic
    return progress.weight * (_SLOPE_SHARE * slope + (1 - _SLOPE_SHARE) * optimistic)


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

    KEPT = 0  #: the deadline can still be kept
    #: the session would end too late even alone: it does not delay those whose deadline can be kept
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
