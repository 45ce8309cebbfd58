"""Snapshots: the facts that a policy decides by, from SQL, heartbeats and the coordinator's own
leases."""

from __future__ import annotations

import time
from collections import Counter, deque
from collections.abc import Collection, Mapping
from dataclasses import dataclass, field

import sqlalchemy as sa

from tuna.common.clocks import Throttle
from tuna.coordinator import forecast
from tuna.coordinator.forecast import Left
from tuna.coordinator.pace import EndedStage
from tuna.coordinator.policies import Need, Policy, Snapshot, StageTimes, fair, gradient
from tuna.coordinator.quarantine import Quarantine
from tuna.db.engine import reading
from tuna.jobs import waiting_rounds
from tuna.jobs.open_steps import OpenStep, SearchProgress
from tuna.jobs.serving import SessionWork
from tuna.queue.heartbeat import HeartbeatBoard

#: Seconds between two counts of live workers
_COUNT_EVERY_S = 1.0
#: Seconds between two queries for what is left and how searches progress, and maximum share of the
#: time that these take
_READ_EVERY_S, _READ_SHARE = 1.0, 0.05


@dataclass(frozen=True)
class Chunks:
    """Chunks of this coordinator, by queue."""

    waiting: Counter[str]  #: number of chunks by queue that no worker has taken yet
    #: number of the last share by session and queue
    served: Mapping[tuple[int, str], int]
    #: number of chunks by queue that workers hold
    running: Mapping[str, int] = field(default_factory=dict)
    queued_per_process: Mapping[str, int] = field(default_factory=dict)


class Snapshots:
    """Takes snapshots of some sessions, with what the policy needs and no more."""

    def __init__(
        self,
        engine: sa.Engine,
        board: HeartbeatBoard,
        quarantine: Quarantine,
        ended: deque[EndedStage],
        bound: int,
        policy: Policy | None = None,
    ) -> None:
        """`ended`: stages that the drain saw end; `bound`: chunks that may wait in a queue;
        `policy`: None for the default."""
        self._engine = engine
        self._board = board
        self._quarantine = quarantine
        self._ended = ended
        self._bound = bound
        self._given = policy
        #: facts that the policy needs; the default policy is one of two, of which `gradient` needs
        #: more
        self._needs = (policy or gradient).needs
        self._processes: Counter[str] = Counter()
        self._counts = Throttle(_COUNT_EVERY_S)
        self._reads = Throttle(_READ_EVERY_S, _READ_SHARE)
        self._times = StageTimes()
        self._learned: set[int] = set()  #: sessions whose earlier durations are known
        self._left: dict[int, Left] = {}
        self._progress: dict[int, Mapping[int, SearchProgress]] = {}

    def policy(self, works: Collection[SessionWork]) -> Policy:
        """The given one; else `gradient` for a single session that searches for layers of models,
        and `fair` for all others."""
        if self._given is not None:
            return self._given
        alone = next(iter(works)) if len(works) == 1 else None
        return (
            gradient
            if alone and any(one.weight for one in self._progress_of(alone).values())
            else fair
        )

    def take(
        self,
        policy: Policy,
        works: Collection[SessionWork],
        chunks: Chunks,
    ) -> Snapshot:
        """Return the open steps and the facts that the policy needs."""
        steps: list[OpenStep] = []
        for work in works:
            with self._quarantine.guard(work):
                steps += self._open_steps(policy, work)
        predicts = policy.needs & (Need.LEFT | Need.PROGRESS)
        kinds = {step.kind for step in steps} if predicts else ()
        predictions = {kind: cost.seconds for kind in kinds if (cost := self._times.predict(kind))}
        return Snapshot(
            steps,
            chunks.waiting,
            self._live_processes(),
            self._bound,
            queued_per_process=chunks.queued_per_process,
            running=chunks.running,
            now_s=time.time(),
            served=chunks.served,
            deadline_s={
                work.session_id: work.options.deadline.timestamp()
                for work in works
                if work.options.deadline
            },
            left_s={
                (session_id, queue): seconds
                for session_id, left in self._left.items()
                for queue, seconds in left.seconds(self._times).items()
            },
            predicted_s=predictions,
        )

    @staticmethod
    def chooses(policy: Policy, work: SessionWork) -> bool:
        """True if the policy sees each round of a search that waits as a separate step, beside the
        session's other jobs."""
        return Need.ROUNDS in policy.needs and work.library.search is not None

    def _open_steps(self, policy: Policy, work: SessionWork) -> list[OpenStep]:
        steps = work.open_steps()
        if not self.chooses(policy, work):
            return steps + work.further_rounds()
        with reading(self._engine) as connection:
            return steps + waiting_rounds.open_steps(connection, work, self._progress_of(work))

    def _progress_of(self, work: SessionWork) -> Mapping[int, SearchProgress]:
        return self._progress.get(work.session_id, {})

    def refresh(self, works: Collection[SessionWork]) -> None:
        """Read what is left of the sessions, and how their searches get on, where the policy needs
        it and the last reading is old."""
        if self._reads.is_due:
            with self._reads.running():
                self._read(works)

    def _read(self, works: Collection[SessionWork]) -> None:
        self._left, self._progress = {}, {}
        known: list[SessionWork] = []
        for work in works:
            with self._quarantine.guard(work):
                known += [work] if self._predicts(work) else []
        if known:
            self._note_ended(known)
            with reading(self._engine) as connection:
                for work in known:
                    with self._quarantine.guard(work):
                        self._read_session(connection, work)

    def _predicts(self, work: SessionWork) -> bool:
        return Need.LEFT in self._needs or self._follows(work)

    def _follows(self, work: SessionWork) -> bool:
        return Need.PROGRESS in self._needs and work.library.search is not None

    def _read_session(self, connection: sa.Connection, work: SessionWork) -> None:
        left = forecast.left(connection, work)
        if left.stages and work.session_id not in self._learned:
            self._learned.add(work.session_id)
            forecast.learn(connection, work, left.sample, self._times)
        self._left[work.session_id] = left
        if self._follows(work):
            self._progress[work.session_id] = waiting_rounds.progress(connection, work)

    def _note_ended(self, works: Collection[SessionWork]) -> None:
        """Learn from the stages that ended since the last time, of the sessions whose queues are
        known here."""
        by_id = {work.session_id: work for work in works}
        while self._ended:
            stage = self._ended.popleft()
            if work := by_id.get(stage.session_id):
                with self._quarantine.guard(work):
                    kind = forecast.stage_kind(work, stage.solver_id, stage.step)
                    self._times.note(kind, stage.seconds)

    def _live_processes(self) -> Counter[str]:
        if self._counts.is_due:
            with self._counts.running():
                self._processes = Counter(
                    queue for one in self._board.live() if not one.aside for queue in one.queues
                )
        return self._processes
