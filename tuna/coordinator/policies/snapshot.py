"""The input and the output of a policy, how policies fill a queue from steps in an order, and the
prediction of how long a stage takes: the median of the latest ones of its solver."""

from __future__ import annotations

import statistics
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from enum import Flag, auto
from itertools import chain, repeat

from tuna.jobs.open_steps import OpenStep, StageKind

#: Maximum of chunks that wait for each live process of a queue: it never idles, and what is not
#: published can be decided later. An autoscaler needs to see more of them than processes.
PER_PROCESS = 2
#: Maximum of chunks that wait in a queue without a live process, so that the first one finds work
_WITHOUT_PROCESS = 4


@dataclass(frozen=True)
class Snapshot:
    """The facts that a policy decides by.

    All of it is known to a coordinator from SQL, heartbeats and its own leases; nothing is from the
    future. Times are seconds, `now_s`, `since_s` and `deadline_s` since one moment.
    """

    open: Sequence[OpenStep]
    waiting: Mapping[str, int]  #: number of chunks by queue that no worker has taken yet
    processes: Mapping[str, int]  #: number of live worker processes by queue
    bound: int  #: maximum of chunks that wait in a queue
    per_process: int = PER_PROCESS  #: maximum of chunks that wait for each live process
    #: maximum of chunks that wait for each process by queue, where no autoscaler counts them; 0:
    #: none without a free process
    queued_per_process: Mapping[str, int] = field(default_factory=dict)
    #: number of chunks by queue that workers hold
    running: Mapping[str, int] = field(default_factory=dict)
    now_s: float = 0.0
    #: number of the last share by session and queue
    served: Mapping[tuple[int, str], int] = field(default_factory=dict)
    #: number of chunks by session and step that are published and have not ended
    in_flight: Mapping[tuple[int, str], int] = field(default_factory=dict)
    #: deadline by session, where it has one
    deadline_s: Mapping[int, float] = field(default_factory=dict)
    #: predicted seconds of work that is not done, by session and queue
    left_s: Mapping[tuple[int, str], float] = field(default_factory=dict)
    #: predicted seconds of a stage (`StageTimes`)
    predicted_s: Mapping[StageKind, float] = field(default_factory=dict)

    def room(self, queue: str) -> int:
        """Chunks that may still be published into the queue."""
        processes = self.processes.get(queue, 0)
        queued = min(self.per_process, self.queued_per_process.get(queue, self.per_process))
        if not processes:
            wanted = _WITHOUT_PROCESS
        elif queued:
            wanted = queued * processes
        else:
            wanted = processes - self.running.get(queue, 0)
        return max(0, min(self.bound, wanted) - self.waiting.get(queue, 0))

    def by_queue(self) -> dict[str, list[OpenStep]]:
        """The open steps of each queue into which something may be published."""
        found: dict[str, list[OpenStep]] = {}
        for step in self.open:
            found.setdefault(step.queue, []).append(step)
        return {queue: steps for queue, steps in found.items() if self.room(queue)}

    def turn(self, step: OpenStep) -> int:
        """The lower, the longer ago the session was served in the queue of the step."""
        return self.served.get((step.session_id, step.queue), -1)


@dataclass(frozen=True)
class Share:
    """Chunks of a session's step to publish now."""

    step: OpenStep
    chunks: int


class Need(Flag):
    """Facts beyond the open steps that a policy decides by; a snapshot has no others."""

    NOTHING = 0
    LEFT = auto()  #: work that is left of each session, with the predicted duration of its stages
    #: results of each search so far, with the work that is left of sessions that search
    PROGRESS = auto()
    #: rounds that wait, each as an open step of its own; without it all jobs of a session that wait
    #: for a step count as alike
    ROUNDS = auto()


@dataclass(frozen=True)
class Policy:
    """Says what is published next: shares that fit into the queues, in the order in which they are
    published.

    What had less open work than its share is left out of the next snapshot.
    """

    name: str
    decide: Callable[[Snapshot], list[Share]] = field(repr=False)
    needs: Need = Need.NOTHING

    def __call__(self, snapshot: Snapshot) -> list[Share]:
        """Return the shares."""
        return self.decide(snapshot)


def policy(needs: Need) -> Callable[[Callable[[Snapshot], list[Share]]], Policy]:
    """Make a policy of a function, under its name."""
    return lambda decide: Policy(decide.__name__, decide, needs)


def in_order(snapshot: Snapshot, rank: Callable[[OpenStep], tuple[float, ...]]) -> list[Share]:
    """Fill each queue with the steps of the least rank; of equal ones, the first in the
    snapshot."""
    shares: list[Share] = []
    for queue, steps in snapshot.by_queue().items():
        room = snapshot.room(queue)
        for step in sorted(steps, key=rank):
            chunks = room if step.ready is None else min(room, step.ready)
            if chunks:
                shares.append(Share(step, chunks))
                room -= chunks
            if not room:
                break
    return shares


def in_turn(lines: Iterable[Sequence[OpenStep]], room: int) -> list[Share]:
    """Deal chunks to lines of steps in turn, one by one, until `room` is used up; a line is served
    in its order."""
    turns = deque(chain.from_iterable(map(_chunks, line)) for line in lines)
    dealt: dict[int, list[OpenStep]] = {}
    while room and turns:
        line = turns.popleft()
        step = next(line, None)
        if step is not None:
            dealt.setdefault(id(step), []).append(step)
            room -= 1
            turns.append(line)
    return [Share(chunks[0], len(chunks)) for chunks in dealt.values()]


def _chunks(step: OpenStep) -> Iterator[OpenStep]:
    """The step once for each chunk that can be published."""
    return repeat(step) if step.ready is None else repeat(step, step.ready)


#: Number of latest durations that a prediction is made from
_WINDOW = 200
#: Factor of the number of durations at which a prediction is made anew, unless they are more by a
#: quarter of the window first
_GROWTH = 1.25


@dataclass(frozen=True)
class Prediction:
    """A duration in seconds, and how wrong it was for those that it was made from."""

    seconds: float
    error: float  #: median of |duration - seconds| / duration, such as 0.3
    durations: int  #: number of durations that it was made from


class _Window:
    """The latest durations, and what is predicted from them."""

    def __init__(self) -> None:
        self._latest: deque[float] = deque(maxlen=_WINDOW)
        self._seen = self._due = 0
        self.prediction = Prediction(0.0, 0.0, 0)

    def note(self, seconds: float) -> bool:
        """Add a duration; returns whether the prediction changed."""
        self._latest.append(seconds)
        self._seen += 1
        if self._seen < self._due:
            return False
        self._due = min(int(self._seen * _GROWTH), self._seen + _WINDOW // 4) + 1
        median = statistics.median(self._latest)
        error = statistics.median(abs(one - median) / max(one, 1e-9) for one in self._latest)
        self.prediction = Prediction(median, error, len(self._latest))
        return True


class StageTimes:
    """Durations of ended stages by queue, solver and step."""

    def __init__(self) -> None:
        self._kinds: dict[StageKind, _Window] = {}
        self._steps: dict[tuple[str, str], _Window] = {}
        self.version = 0  #: number that changes when a prediction does

    def note(self, kind: StageKind, seconds: float) -> None:
        """Remember how long a stage took."""
        of_kind = self._kinds.get(kind)
        if of_kind is None:
            of_kind = self._kinds[kind] = _Window()
        of_step = self._steps.get((kind.queue, kind.step))
        if of_step is None:
            of_step = self._steps[kind.queue, kind.step] = _Window()
        changed = of_kind.note(seconds)
        if of_step.note(seconds) or changed:
            self.version += 1

    def predict(self, kind: StageKind) -> Prediction | None:
        """The next duration: by the solver, else by all solvers of the step there; None while
        nothing is known."""
        window = self._kinds.get(kind) or self._steps.get((kind.queue, kind.step))
        return window.prediction if window else None
