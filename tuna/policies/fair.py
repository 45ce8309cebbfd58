"""Sessions in turn, so that none waits for another to end."""

from __future__ import annotations

from itertools import groupby

from tuna.policies.snapshot import Need, OpenStep, Share, Snapshot, in_turn, policy


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
