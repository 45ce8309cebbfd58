"""A scenario from what sessions recorded: the durations of their accepted attempts, as in the table `step_result`."""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Sequence
from dataclasses import dataclass, field
from datetime import datetime

import sqlalchemy as sa

from tuna.db import sessions
from tuna.db.models import Job, Solver, StepResult
from tuna.errors import BadInput
from tuna.libraries.base import Environment
from tuna.libraries.registry import find_library
from tuna.queues import queue_name
from tuna.simulation.scenario import Jobs, Pool, Scenario, SimulatedSession, Stage
from tuna.vocabulary import Resource


@dataclass
class _Recording:
    """What the attempts at a session's jobs say."""

    environment: Environment
    solvers: dict[int, str] = field(default_factory=dict)  #: by job, in the order of their ids
    seconds: dict[int, dict[str, float]] = field(default_factory=lambda: defaultdict(dict))  #: of the last good attempt
    good: Counter[tuple[str, str]] = field(default_factory=Counter)  #: attempts by solver and step
    failed: Counter[tuple[str, str]] = field(default_factory=Counter)
    workers: dict[str, set[str]] = field(default_factory=lambda: defaultdict(set))  #: by step
    devices: dict[str, set[str]] = field(default_factory=lambda: defaultdict(set))

    def queue(self, step: str) -> str:
        """The queue of a step: by the library, or if it is not installed, by whether its results name a device."""
        library = find_library(self.environment.library)
        resources = {one.name: one.resource for one in library.every_step} if library else {}
        on_device = resources.get(step, Resource.DEVICE if self.devices[step] else Resource.CPU) is Resource.DEVICE
        return queue_name(on_device, self.environment.toolchain, self.environment.machine_key)

    def lines(self) -> list[Jobs]:
        """Its jobs by solver and steps, each with its own durations."""
        alike: dict[tuple[str, tuple[str, ...]], list[int]] = defaultdict(list)
        for job_id, solver in self.solvers.items():
            if steps := tuple(self.seconds[job_id]):
                alike[solver, steps].append(job_id)
        queues = {step: self.queue(step) for _, steps in alike for step in steps}
        return [
            Jobs(
                solver=solver,
                count=len(job_ids),
                steps=tuple(
                    Stage(
                        step=step,
                        queue=queues[step],
                        seconds=tuple(self.seconds[job_id][step] for job_id in job_ids),
                        fails=self.failed[solver, step] / (self.failed[solver, step] + self.good[solver, step]),
                    )
                    for step in steps
                ),
            )
            for (solver, steps), job_ids in sorted(alike.items())
        ]


def recorded(
    connection: sa.Connection,
    session_ids: Sequence[int],
    *,
    workers: int | None = None,
    devices: int | None = None,
) -> Scenario:
    """The sessions side by side, from the same moment on, each job with the durations of its last good attempts.

    `workers`: processes for each queue of CPU steps; `devices`: for each environment; those that took part, if not given.
    Attempts fail with the same frequency as they did, by solver and step. Raises NotFound for an unknown session, BadInput for
    one without any result.
    """
    simulated: list[SimulatedSession] = []
    found: dict[str, int] = {}
    for session_id in session_ids:
        info = sessions.get(connection, session_id)
        recording = _read(connection, session_id, info.environment)
        lines = recording.lines()
        if not lines:
            raise BadInput(
                f"Session {session_id} has no result to take durations from.",
                hint=f"run: `tuna run --session-id {session_id}`",
            )
        simulated.append(SimulatedSession(name=f"session {session_id}", priority=info.priority, jobs=tuple(lines)))
        for step in {stage.step for line in lines for stage in line.steps}:
            queue, places = recording.queue(step), recording.devices[step] or recording.workers[step]
            on_device = queue.startswith("eval.")
            wanted = devices if on_device else workers
            found[queue] = wanted or max(found.get(queue, 1), len(places))
    pools = tuple(Pool(queue=queue, processes=count) for queue, count in sorted(found.items()))
    return Scenario(sessions=tuple(simulated), pools=pools)


def _read(connection: sa.Connection, session_id: int, environment: Environment) -> _Recording:
    recording = _Recording(environment)
    columns = (
        StepResult.job_id,
        StepResult.step,
        StepResult.ok,
        StepResult.worker,
        StepResult.device,
        StepResult.busy_s,
    )
    query = (
        sa.select(*columns, StepResult.started_at, StepResult.ended_at, Solver.name.label("solver"))
        .join(Job, Job.id == StepResult.job_id)
        .join(Solver, Solver.id == Job.solver_id)
        .where(Job.session_id == session_id)
        .order_by(StepResult.job_id, StepResult.id)
    )
    for row in connection.execute(query):
        recording.solvers[row.job_id] = row.solver
        recording.workers[row.step].add(row.worker)
        if row.device:
            recording.devices[row.step].add(row.device)
        (recording.good if row.ok else recording.failed)[row.solver, row.step] += 1
        if row.ok:
            recording.seconds[row.job_id][row.step] = _seconds(row.started_at, row.ended_at, row.busy_s)
    return recording


def _seconds(started_at: datetime | None, ended_at: datetime | None, busy_s: float) -> float:
    """How long an attempt held its process."""
    return max(0.0, (ended_at - started_at).total_seconds()) if started_at and ended_at else busy_s
