"""The policies that docs/scheduling.md compares with. They know no priorities, and a job of the
thesis is a session here.

`sequential` and `synchronous` leave devices idle, and `unsynchronised` publishes more than fits:
that is their point.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

from tuna.coordinator.policies import Need, OpenStep, Share, Snapshot, in_order, in_turn, policy


@policy(Need.ROUNDS)
def sequential(snapshot: Snapshot) -> list[Share]:
    """One session after another, as if each had the machines for itself."""
    in_flight = {session_id for (session_id, _), chunks in snapshot.in_flight.items() if chunks}
    first = min(in_flight | {step.session_id for step in snapshot.open}, default=0)
    mine = [step for step in snapshot.open if step.session_id == first]
    return in_order(replace(snapshot, open=mine), lambda step: (step.remaining, step.since_s))


@policy(Need.ROUNDS)
def greedy(snapshot: Snapshot) -> list[Share]:
    """Go on with what has just run in a queue; else sessions in a fixed order, beginning after
    the one served last."""
    last = {
        queue: session_id
        for _, (session_id, queue) in sorted((n, key) for key, n in snapshot.served.items())
    }
    most = max((step.session_id for step in snapshot.open), default=0) + 1

    def rank(step: OpenStep) -> tuple[float, ...]:
        return (
            not step.continues,
            (step.session_id - last.get(step.queue, -1) - 1) % most,
            step.remaining,
            step.since_s,
        )

    return in_order(snapshot, rank)


@policy(Need.ROUNDS)
def synchronous(snapshot: Snapshot) -> list[Share]:
    """Publish the same step of all sessions at once: the next one starts when it has ended
    everywhere."""
    running = {step for (_, step), chunks in snapshot.in_flight.items() if chunks}
    if not running and snapshot.open:
        running = {max(snapshot.open, key=lambda step: step.remaining).step}
    same = [step for step in snapshot.open if {step.step} == running]
    return _first_come(replace(snapshot, open=same), lambda step: (step.since_s,))


@policy(Need.ROUNDS)
def unsynchronised(snapshot: Snapshot) -> list[Share]:
    """Everything at once: nothing is decided late, and the queue or the machine sorts it out."""
    ranked = sorted(snapshot.open, key=lambda step: step.since_s)
    return [
        Share(step, snapshot.room(step.queue) if step.ready is None else step.ready)
        for step in ranked
    ]


@policy(Need.ROUNDS)
def fifo(snapshot: Snapshot) -> list[Share]:
    """First come, first served, in each queue: what the thesis calls fair."""
    return _first_come(snapshot, lambda step: (step.since_s,))


@policy(Need.ROUNDS)
def bundled(snapshot: Snapshot) -> list[Share]:
    """First come, first served, where consecutive steps in one queue are one."""
    return _first_come(snapshot, lambda step: (not step.continues, step.since_s))


def _first_come(snapshot: Snapshot, rank: Callable[[OpenStep], tuple[float, ...]]) -> list[Share]:
    """As `in_order`, but of steps for which many jobs wait one chunk each: they became ready at
    about the same time."""
    shares: list[Share] = []
    for queue, steps in snapshot.by_queue().items():
        shares += in_turn([[step] for step in sorted(steps, key=rank)], snapshot.room(queue))
    return shares
