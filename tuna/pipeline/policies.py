"""What to publish next: pure functions from a snapshot of the open work to shares of the queues."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from itertools import groupby

#: Chunks that may wait for each live process of a queue: it never idles, and what is not published can be decided later.
_PER_PROCESS = 2
#: Chunks that wait in a queue of which no process is live, so that the first one finds work.
_WITHOUT_PROCESS = 4


@dataclass(frozen=True)
class OpenStep:
    """A step of a session for which jobs may wait."""

    session_id: int
    step: str
    queue: str
    priority: int = 0  #: the session's, 0 to 9; the highest is first
    remaining: int = 0  #: steps that follow this one


@dataclass(frozen=True)
class Snapshot:
    """What a policy decides by."""

    open: Sequence[OpenStep]  #: the session that was served longest ago first
    waiting: Mapping[str, int]  #: chunks that no worker took yet, by queue
    processes: Mapping[str, int]  #: live worker processes, by queue
    bound: int  #: chunks that may wait in any queue

    def room(self, queue: str) -> int:
        """Chunks that may still be published into the queue."""
        wanted = _PER_PROCESS * self.processes.get(queue, 0) or _WITHOUT_PROCESS
        return max(0, min(self.bound, wanted) - self.waiting.get(queue, 0))


@dataclass(frozen=True)
class Share:
    """Chunks of a session's step to publish now."""

    step: OpenStep
    chunks: int


#: Shares that fit into the queues. What had less open work than its share is left out of the next snapshot.
Policy = Callable[[Snapshot], list[Share]]


def by_priority(snapshot: Snapshot) -> list[Share]:
    """A session's priority first, then later steps, then sessions in turn, chunk by chunk."""
    shares: list[Share] = []
    ranked = sorted(snapshot.open, key=_rank)
    for queue in dict.fromkeys(step.queue for step in ranked):
        first = list(next(groupby((step for step in ranked if step.queue == queue), key=_rank))[1])
        dealt = Counter(first[number % len(first)] for number in range(snapshot.room(queue)))
        shares += [Share(step, chunks) for step, chunks in dealt.items()]
    return shares


def _rank(step: OpenStep) -> tuple[int, int]:
    return -step.priority, step.remaining
