"""Runs a scenario under a policy: events in the order of time, decisions by the pipeline's own
policies."""

from __future__ import annotations

import heapq
import sys
from collections import defaultdict, deque
from collections.abc import Callable, Iterable
from functools import partial

from tuna.coordinator.policies import Policy, Share, Snapshot
from tuna.errors import TunaError
from tuna_simulate.jobs import Forecast, Item, JobLine, SessionTally, seeded
from tuna_simulate.machines import Process, SimulatedPool, SimulatedQueue, StageGroup
from tuna_simulate.scenario import Pool, QueueOutcome, Scenario, Simulated, work_bound_s


def simulate(scenario: Scenario, policy: Policy, seed: int = 0) -> Simulated:
    """Simulate what happens if the policy decides; equal arguments give equal outcomes.

    Durations depend on the seed and not on the policy; failures and crashes on both. Raises
    TunaError for a policy that publishes nothing of what is open.
    """
    return _Simulation(scenario, policy, seed).run()


class _Simulation:
    def __init__(self, scenario: Scenario, policy: Policy, seed: int) -> None:
        self._scenario, self._policy, self._seed = scenario, policy, seed
        sessions = [session for session in scenario.sessions for _ in range(session.copies)]
        self._sessions = {
            n: SessionTally(n, session, seed) for n, session in enumerate(sessions, 1)
        }
        self._queues = {
            name: SimulatedQueue(name) for name in sorted({pool.queue for pool in scenario.pools})
        }
        self._random = seeded(seed, "failures")
        self._now_s = 0.0
        self._events: list[tuple[float, int, Callable[[], None]]] = []
        self._pushed = 0
        self._decide_from_s = 0.0
        self._decision_due = False
        self._changed: dict[str, None] = {}  #: queues in which something may be published or taken
        self._open_jobs = sum(
            line.open_jobs for session in self._sessions.values() for line in session.lines
        )
        self._deadline_s = {
            n: session.deadline_s
            for n, session in enumerate(sessions, 1)
            if session.deadline_s is not None
        }
        #: Groups of the last snapshot; the key is the `id` of the open step.
        self._offered: dict[int, StageGroup] = {}
        self._forecast = Forecast()
        self._served: dict[tuple[int, str], int] = {}
        self._in_flight: dict[tuple[int, str], int] = defaultdict(int)
        self._failed = self._crashes = self._decisions = self._shares = 0
        self._longest_chain_s = 0.0

    def run(self) -> Simulated:
        """All events, to the last one that matters."""
        for pool in self._scenario.pools:
            self._at(pool.joins_s, partial(self._join, pool))
        for session in self._sessions.values():
            self._at(session.given.arrives_s, partial(self._arrive, session))
        while self._open_jobs:
            if not self._events:
                raise TunaError(
                    f"The policy {self._policy.name} publishes nothing of what is open."
                )
            self._now_s, moment_s = self._events[0][0], self._events[0][0]
            for counted in self._queues.values():
                counted.count(moment_s)
            while self._events and self._events[0][0] == moment_s:
                heapq.heappop(self._events)[2]()
            self._take()
            self._decide()
        return self._outcome()

    def _at(self, moment_s: float, what: Callable[[], None]) -> None:
        self._pushed += 1
        heapq.heappush(self._events, (moment_s, self._pushed, what))

    # What happens.

    def _join(self, pool: Pool) -> None:
        simulated, queue = SimulatedPool(pool), self._queues[pool.queue]
        queue.live += pool.processes
        queue.free.extend(Process(simulated) for _ in range(pool.processes))
        self._changed[pool.queue] = None
        if pool.leaves_s is not None:
            self._at(max(pool.leaves_s, pool.joins_s), partial(self._leave, simulated))

    def _leave(self, pool: SimulatedPool) -> None:
        """Free processes leave at once, the others when their item ends."""
        pool.leaves = True
        queue = self._queues[pool.pool.queue]
        staying = deque(process for process in queue.free if process.pool is not pool)
        queue.live -= len(queue.free) - len(staying)
        queue.free = staying

    def _arrive(self, session: SessionTally) -> None:
        self._forecast.arrive(session.session_id, session.lines)
        for line in session.lines:
            for job in line.start():
                for item in job.ready(self._now_s):
                    self._open(item)

    def _open(self, item: Item, after: str = "") -> None:
        """An item became ready, by the end of a stage in queue `after`."""
        line = item.job.line
        name = item.kind.queue
        queue = self._queues[name]
        rounds, continues = item.job.finished if line.jobs.best_ms else 0, name == after
        if item.stage == 0 and line.in_one_queue:
            continues = False
        key = (id(line), item.stage, rounds, continues)
        group = queue.groups.get(key)
        if group is None:
            group = queue.groups[key] = StageGroup(key, line, item.stage, rounds, continues)
        group.items.append(item)
        queue.open_items += 1
        self._changed[name] = None

    def _end(self, process: Process, version: int) -> None:
        """The item of a process ends, unless that was put off meanwhile."""
        if process.version != version:
            return
        item, pool = process.item, process.pool
        assert item is not None
        line, kind = item.job.line, item.kind
        queue, session = self._queues[kind.queue], self._sessions[line.session_id]
        ran_s = self._now_s - item.started_s
        session.ran_s[kind.step] += ran_s
        self._stop(process)
        if item.crashes:
            self._crashes += 1
            queue.live -= 1
            self._at(self._now_s + pool.pool.restart_s, partial(self._restart, process))
            self._at(self._now_s + self._scenario.lease_s, partial(self._fail, item))
            return
        self._free(process)
        fails = line.stages[item.stage].fails
        if fails and self._random.random() < fails:
            self._fail(item)
            return
        self._in_flight[line.session_id, kind.step] -= 1
        self._forecast.end(item, ran_s)
        queue.work_s += item.seconds
        self._good(session, item)

    def _good(self, session: SessionTally, item: Item) -> None:
        job, line = item.job, item.job.line
        if job.dead:
            return
        line.left[item.stage] -= 1
        self._forecast.subtract(line.session_id, item.kind)
        before = job.finished
        for following in job.end(item, self._now_s):
            self._open(following, item.kind.queue)
        if job.finished > before:
            session.measured(line, before, job.finished, self._now_s)
        if job.done:
            self._longest_chain_s = max(self._longest_chain_s, job.prefix_chain_s[-1])
            self._close(session, line)

    def _fail(self, item: Item) -> None:
        """An attempt failed, or was lost: the item is open again, or its job errored."""
        job, line = item.job, item.job.line
        kind, session = item.kind, self._sessions[line.session_id]
        self._failed += 1
        self._in_flight[line.session_id, kind.step] -= 1
        item.attempts += 1
        item.ready_s = self._now_s
        item.crashes = False
        self._changed[kind.queue] = None
        if job.dead:
            return
        if item.attempts < self._scenario.max_attempts:
            self._open(item)
        else:
            job.drop()
            self._forecast.expire()
            session.errored += 1
            self._close(session, line)

    def _close(self, session: SessionTally, line: JobLine) -> None:
        """A job ended."""
        line.open_jobs -= 1
        self._open_jobs -= 1
        session.ended_s = self._now_s
        if not any(one.open_jobs for one in session.lines):
            self._forecast.leave(session.session_id)

    # Processes.

    def _restart(self, process: Process) -> None:
        if not process.pool.leaves:
            self._queues[process.pool.pool.queue].live += 1
            self._free(process)

    def _free(self, process: Process) -> None:
        queue = self._queues[process.pool.pool.queue]
        if process.pool.leaves:
            queue.live -= 1
        else:
            queue.free.append(process)
        self._changed[queue.name] = None

    def _take(self) -> None:
        """Free processes take what waits, in the order in which it was published."""
        for name in self._changed:
            queue = self._queues[name]
            while queue.free and queue.waiting:
                item = queue.waiting.popleft()
                if item.job.dead:
                    line = item.job.line
                    self._in_flight[line.session_id, item.kind.step] -= 1
                else:
                    self._start(queue.free.popleft(), item)

    def _start(self, process: Process, item: Item) -> None:
        self._sessions[item.job.line.session_id].waited_s += self._now_s - item.ready_s
        self._forecast.start(item)
        item.started_s = self._now_s
        seconds = item.seconds
        if process.pool.pool.crashes_every_s is not None:
            lives_s = self._random.expovariate(1 / process.pool.pool.crashes_every_s)
            item.crashes = lives_s < seconds
            seconds = min(seconds, lives_s)
        pool = process.pool
        if pool.shares:
            pool.advance(self._now_s)
            pool.running[process] = None
        process.item, process.left_s = item, seconds
        if pool.shares:
            self._put_off(pool)
        else:
            process.version += 1
            self._at(self._now_s + seconds, partial(self._end, process, process.version))

    def _stop(self, process: Process) -> None:
        pool = process.pool
        if pool.shares:
            pool.advance(self._now_s)
            del pool.running[process]
            self._put_off(pool)
        process.item = None

    def _put_off(self, pool: SimulatedPool) -> None:
        """More or fewer processes share the cores: all of them end at another time."""
        for moment_s, process in pool.ends(self._now_s):
            process.version += 1
            self._at(moment_s, partial(self._end, process, process.version))

    # Decisions.

    def _decide(self) -> None:
        if not self._changed:
            return
        if self._now_s < self._decide_from_s:
            if not self._decision_due:
                self._decision_due = True
                self._at(self._decide_from_s, self._due)
            return
        while self._publish(self._policy(self._snapshot())):
            pass  # a share went to jobs that errored meanwhile: others may have its place
        self._take()
        self._decisions += 1
        self._changed.clear()
        self._decide_from_s = self._now_s + self._scenario.decide_every_s

    def _due(self) -> None:
        self._decision_due = False

    def _snapshot(self) -> Snapshot:
        per_process = 1 + self._scenario.ahead
        self._offered = {}
        open_steps = []
        for queue in self._queues.values():
            if queue.open_items and (not queue.live or queue.occupied < per_process * queue.live):
                for group in queue.groups.values():
                    step = group.as_open_step()
                    self._offered[id(step)] = group
                    open_steps.append(step)
        self._forecast.refresh()
        return Snapshot(
            open=open_steps,
            waiting={name: queue.occupied for name, queue in self._queues.items()},
            processes={name: queue.live for name, queue in self._queues.items()},
            bound=sys.maxsize,
            per_process=per_process,
            now_s=self._now_s,
            served=self._served,
            in_flight=self._in_flight,
            deadline_s=self._deadline_s,
            left_s=self._forecast.left_s,
            predicted_s=self._forecast.predicted_s,
        )

    def _publish(self, shares: Iterable[Share]) -> bool:
        """Publish; returns whether some of it was dropped, since its job has errored."""
        dropped = False
        for share in shares:
            group, name = self._offered[id(share.step)], share.step.queue
            queue, line = self._queues[name], group.line
            items = [group.items.popleft() for _ in range(min(share.chunks, len(group.items)))]
            queue.open_items -= len(items)
            if not group.items:
                del queue.groups[group.key]
            alive = [item for item in items if not item.job.dead]
            queue.waiting.extend(alive)
            self._in_flight[line.session_id, share.step.step] += len(alive)
            self._shares += 1
            self._served[line.session_id, name] = self._shares
            self._changed[name] = None
            dropped = dropped or len(alive) < len(items)
        return dropped

    def _outcome(self) -> Simulated:
        sessions = tuple(session.outcome() for session in self._sessions.values())
        first_s = min(session.arrives_s for session in sessions)
        bound_s = self._longest_chain_s
        for queue in self._queues.values():
            pools = [pool for pool in self._scenario.pools if pool.queue == queue.name]
            bound_s = max(bound_s, work_bound_s(queue.work_s, pools, first_s))
        makespan_s = max(session.ended_s for session in sessions) - first_s
        lower_bound_s = bound_s - first_s
        return Simulated(
            policy=self._policy.name,
            seed=self._seed,
            makespan_s=makespan_s,
            lower_bound_s=lower_bound_s,
            efficiency=lower_bound_s / makespan_s if makespan_s else 1.0,
            jobs=sum(session.jobs for session in sessions),
            errored=sum(session.errored for session in sessions),
            failed_attempts=self._failed,
            crashes=self._crashes,
            decisions=self._decisions,
            sessions=sessions,
            queues=tuple(
                QueueOutcome(
                    queue=queue.name,
                    live_s=queue.live_s,
                    busy_s=queue.busy_s,
                    busy_share=queue.busy_s / queue.live_s if queue.live_s else 0.0,
                    idle_with_open_work_s=queue.idle_s,
                )
                for queue in self._queues.values()
            ),
            predictions=self._forecast.outcomes(),
        )
