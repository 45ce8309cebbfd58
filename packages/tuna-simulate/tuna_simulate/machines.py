"""Simulated processes: how long they run, with whom they share cores, when they die."""

from __future__ import annotations

from collections import deque
from collections.abc import Iterator
from dataclasses import dataclass, field

from tuna.coordinator.policies import OpenStep
from tuna_simulate.jobs import Item, JobLine
from tuna_simulate.scenario import Pool

#: Identity of the line, stage, finished rounds where they matter, whether it continues.
GroupKey = tuple[int, int, int, bool]


@dataclass(eq=False, slots=True)
class Process:
    """A worker process, which runs one item at a time."""

    pool: SimulatedPool
    item: Item | None = None
    left_s: float = 0.0  #: seconds of work of its item that were left at the pool's last change
    version: int = 0  #: number of the latest event for the item's end; earlier events are void


class SimulatedPool:
    """Processes that share cores where there are more of them than cores."""

    def __init__(self, pool: Pool) -> None:
        self.pool = pool
        self.leaves = False  #: True if its processes end after what they run
        self.shares = pool.cores is not None and pool.cores < pool.processes
        #: Running processes in the order of their start; empty unless the pool shares cores.
        self.running: dict[Process, None] = {}
        self._changed_s = 0.0

    def rate(self, step: str) -> float:
        """Seconds of work in a second: 1 for as many running processes as cores."""
        cores = self.pool.cores or self.pool.processes
        excess = max(0.0, len(self.running) / cores - 1)
        return 1 / (1 + self.pool.slowdown.get(step, 1.0) * excess)

    def advance(self, now_s: float) -> None:
        """Subtract what was done since the last change; to be called before `running` changes."""
        elapsed_s, self._changed_s = now_s - self._changed_s, now_s
        for process in self.running:
            process.left_s -= elapsed_s * self.rate(_step(process))

    def ends(self, now_s: float) -> Iterator[tuple[float, Process]]:
        """When each running process will end if nothing changes."""
        for process in self.running:
            yield now_s + max(0.0, process.left_s) / self.rate(_step(process)), process


def _step(process: Process) -> str:
    assert process.item is not None
    return process.item.job.line.stages[process.item.stage].step


@dataclass(eq=False, slots=True)
class StageGroup:
    """Open items that a policy does not tell apart."""

    key: GroupKey
    line: JobLine
    stage: int
    rounds: int
    continues: bool
    items: deque[Item] = field(default_factory=deque)
    _open: OpenStep | None = None
    _seen: tuple[int, float] = (0, 0.0)

    def as_open_step(self) -> OpenStep:
        """The group as a policy sees it; made anew only where it changed."""
        seen = (len(self.items), self.items[0].ready_s)
        if self._open is None or seen != self._seen:
            kind, session = self.line.kinds[self.stage], self.line.session
            self._seen = seen
            self._open = OpenStep(
                session_id=self.line.session_id,
                step=kind.step,
                queue=kind.queue,
                priority=session.priority,
                remaining=len(self.line.stages) - 1 - self.stage,
                solver=kind.solver,
                ready=seen[0],
                since_s=seen[1],
                continues=self.continues,
                progress=self.line.progress(self.rounds),
            )
        return self._open


@dataclass
class SimulatedQueue:
    """A queue with its processes, and what is open for it."""

    name: str
    groups: dict[GroupKey, StageGroup] = field(default_factory=dict)
    open_items: int = 0
    waiting: deque[Item] = field(default_factory=deque)  #: items that are published and not taken
    free: deque[Process] = field(default_factory=deque)
    live: int = 0
    # Figures of the whole simulation, in process-seconds.
    busy_s: float = 0.0
    live_s: float = 0.0
    idle_s: float = 0.0  #: time of free processes while items were open
    work_s: float = 0.0  #: time of stages that ended well
    _counted_s: float = 0.0

    @property
    def occupied(self) -> int:
        """Chunks that wait or run."""
        return len(self.waiting) + self.live - len(self.free)

    def count(self, now_s: float) -> None:
        """Add up the figures; to be called before anything changes."""
        elapsed_s, self._counted_s = now_s - self._counted_s, now_s
        self.live_s += elapsed_s * self.live
        self.busy_s += elapsed_s * (self.live - len(self.free))
        self.idle_s += elapsed_s * min(len(self.free), self.open_items)
