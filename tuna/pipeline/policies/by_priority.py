"""The pipeline's policy: it needs neither counts of jobs nor durations."""

from __future__ import annotations

from collections import Counter
from itertools import groupby

from tuna.pipeline.policies.snapshot import OpenStep, Share, Snapshot


def by_priority(snapshot: Snapshot) -> list[Share]:
    """A session's priority first, then later steps, then sessions in turn, chunk by chunk; turns are of each queue."""
    shares: list[Share] = []
    ranked = sorted(snapshot.open, key=lambda step: (_rank(step), snapshot.turn(step)))
    for queue in dict.fromkeys(step.queue for step in ranked):
        first = list(next(groupby((step for step in ranked if step.queue == queue), key=_rank))[1])
        dealt = Counter(first[number % len(first)] for number in range(snapshot.room(queue)))
        shares += [Share(step, chunks) for step, chunks in dealt.items()]
    return shares


def _rank(step: OpenStep) -> tuple[int, int]:
    return -step.priority, step.remaining
