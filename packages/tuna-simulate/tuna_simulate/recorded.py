"""A scenario from what sessions recorded: the durations of their accepted attempts, as in the table
`step_result`."""

from __future__ import annotations

import json
from collections import Counter, defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from datetime import datetime
from typing import NamedTuple

import sqlalchemy as sa

from tuna.api.rows import Job, SolverRow, StepResultRow, TrialRow, networks, sessions
from tuna.errors import BadInput
from tuna.libraries.base import Environment, Library
from tuna.libraries.registry import find_library
from tuna.libraries.steps import every_step
from tuna.vocabulary import Resource, queue_name
from tuna_simulate.scenario import Jobs, Pool, Scenario, SimulatedSession, Stage

#: Of a round by step: the seconds of all its parts, and how many these are.
_Round = dict[str, tuple[float, int]]


class _Search(NamedTuple):
    id: int
    config_id: int
    solver: str
    steps: str
    options: str


@dataclass
class _Recording:
    """Facts from the attempts at a session's jobs."""

    environment: Environment
    solvers: dict[int, str] = field(default_factory=dict)  #: solver of each job, by ascending id
    #: Duration of each step in a job's last good attempt.
    seconds: dict[int, dict[str, float]] = field(default_factory=lambda: defaultdict(dict))
    good: Counter[tuple[str, str]] = field(default_factory=Counter)  #: attempts of a (solver, step)
    failed: Counter[tuple[str, str]] = field(default_factory=Counter)
    workers: dict[str, set[str]] = field(
        default_factory=lambda: defaultdict(set)
    )  #: names of the workers of each step
    devices: dict[str, set[str]] = field(default_factory=lambda: defaultdict(set))
    #: Search and number of the round that a job is, or is a part of.
    rounds: dict[int, tuple[_Search, int]] = field(default_factory=dict)
    #: Best time of each round's own trials.
    best_ms: dict[_Search, dict[int, float]] = field(default_factory=lambda: defaultdict(dict))
    #: Calls of each config in the models; empty: it is in none.
    weights: Mapping[int, float] = field(default_factory=dict)

    @property
    def library(self) -> Library | None:
        """Its library, if it is installed."""
        return find_library(self.environment.library)

    def queue(self, step: str) -> str:
        """The queue of a step: by the library, or if it is not installed, by whether its results
        name a device."""
        library = self.library
        resources = {one.name: one.resource for one in every_step(library)} if library else {}
        on_device = (
            resources.get(step, Resource.DEVICE if self.devices[step] else Resource.CPU)
            is Resource.DEVICE
        )
        # in words: people read and change the scenario; the digits tell alike ones apart
        here = self.environment
        words = f"{here.library}-{here.arch}x{here.num_cu}-{here.machine_key[:4]}"
        return queue_name(on_device, here.toolchain, words)

    def lines(self) -> list[Jobs]:
        """Its jobs by solver and steps, each with its own durations, and its searches one by
        one."""
        alike: dict[tuple[str, tuple[str, ...]], list[int]] = defaultdict(list)
        searches: dict[_Search, dict[int, _Round]] = defaultdict(lambda: defaultdict(dict))
        for job_id, solver in self.solvers.items():
            if job_id in self.rounds:
                search, number = self.rounds[job_id]
                round_ = searches[search][number]
                for step, seconds in self.seconds[job_id].items():
                    before_s, parts = round_.get(step, (0.0, 0))
                    round_[step] = before_s + seconds, parts + 1
            elif steps := tuple(self.seconds[job_id]):
                alike[solver, steps].append(job_id)
        lines = [
            Jobs(
                solver=solver,
                count=len(job_ids),
                steps=tuple(
                    self._stage(
                        solver, step, tuple(self.seconds[job_id][step] for job_id in job_ids)
                    )
                    for step in steps
                ),
            )
            for (solver, steps), job_ids in sorted(alike.items())
        ]
        return lines + [
            line for search, rounds in searches.items() if (line := self._search(search, rounds))
        ]

    def _search(self, search: _Search, known: Mapping[int, _Round]) -> Jobs | None:
        """A search, without what was not completed at its end; None if nothing is known of its
        first round."""
        solver, rules = search.solver, self.library.search if self.library else None
        steps = [
            step for step in search.steps.split(",") if any(step in part for part in known.values())
        ]
        whole = [number for number, stages in known.items() if len(stages) == len(steps)]
        count = max(whole, default=0) + 1
        if not whole:
            steps = [step for step in steps if step in known.get(0, {})]
        if not steps:
            return None
        rounds = [known.get(number, {}) for number in range(count)]
        best_ms = [
            min((ms for number, ms in self.best_ms[search].items() if number <= last), default=None)
            for last in range(count)
        ]
        return Jobs(
            solver=solver,
            rounds=count,
            look_ahead=rules.look_ahead(json.loads(search.options)) if rules else 1,
            steps=tuple(
                self._stage(
                    solver,
                    step,
                    tuple(stages.get(step, (0.0, 1))[0] for stages in rounds),
                    tuple(stages.get(step, (0.0, 1))[1] for stages in rounds),
                )
                for step in steps
            ),
            weight=self.weights.get(search.config_id, 0.0) if self.weights else 1.0,
            best_ms=tuple(best_ms) if any(best_ms) else (),
        )

    def _stage(
        self, solver: str, step: str, seconds: tuple[float, ...], parts: tuple[int, ...] = (1,)
    ) -> Stage:
        failed, good = self.failed[solver, step], self.good[solver, step]
        return Stage(
            step=step,
            queue=self.queue(step),
            seconds=seconds,
            fails=failed / (failed + good),
            parts=1 if set(parts) == {1} else parts,
        )


def recorded(
    connection: sa.Connection,
    session_ids: Sequence[int],
    *,
    workers: int | None = None,
    devices: int | None = None,
) -> Scenario:
    """The sessions side by side, from the same moment on, each job, and each round of a search,
    with the durations of its last good attempts.

    `workers`: processes for each queue of CPU steps; `devices`: for each environment; those that
    took part, if not given. Attempts fail with the same frequency as they did, by solver and step.
    Raises NotFound for an unknown session, BadInput for one without any result.
    """
    simulated: list[SimulatedSession] = []
    processes: dict[str, int] = {}
    for session_id in session_ids:
        info = sessions.get(connection, session_id)
        recording = _read(connection, session_id, info.environment)
        lines = recording.lines()
        if not lines:
            raise BadInput(
                f"Session {session_id} has no result to take durations from.",
                hint=f"run: `tuna run --session-id {session_id}`",
            )
        simulated.append(
            SimulatedSession(
                name=f"session {session_id}", priority=info.options.priority, jobs=tuple(lines)
            )
        )
        for step in {stage.step for line in lines for stage in line.steps}:
            queue, places = (
                recording.queue(step),
                recording.devices[step] or recording.workers[step],
            )
            on_device = queue.startswith("eval.")
            wanted = devices if on_device else workers
            processes[queue] = wanted or max(processes.get(queue, 1), len(places))
    pools = tuple(Pool(queue=queue, processes=count) for queue, count in sorted(processes.items()))
    return Scenario(sessions=tuple(simulated), pools=pools)


def _read(connection: sa.Connection, session_id: int, environment: Environment) -> _Recording:
    recording = _Recording(environment)
    columns = (
        StepResultRow.job_id,
        StepResultRow.step,
        StepResultRow.ok,
        StepResultRow.worker,
        StepResultRow.device,
        StepResultRow.busy_s,
    )
    of_search = (
        *(Job.search_id, Job.config_id, SolverRow.name.label("solver"), Job.steps),
        sa.type_coerce(Job.options, sa.Text).label("options"),
    )
    of_job = (*of_search, Job.round)
    query = (
        sa.select(*columns, StepResultRow.started_at, StepResultRow.ended_at, *of_job)
        .join(Job, Job.id == StepResultRow.job_id)
        .join(SolverRow, SolverRow.id == Job.solver_id)
        .where(Job.session_id == session_id)
        .order_by(StepResultRow.job_id, StepResultRow.id)
    )
    for row in connection.execute(query):
        recording.solvers[row.job_id] = row.solver
        if row.search_id is not None:
            search = _Search(row.search_id, row.config_id, row.solver, row.steps, row.options)
            recording.rounds[row.job_id] = search, row.round
        recording.workers[row.step].add(row.worker)
        if row.device:
            recording.devices[row.step].add(row.device)
        (recording.good if row.ok else recording.failed)[row.solver, row.step] += 1
        if row.ok:
            recording.seconds[row.job_id][row.step] = _seconds(
                row.started_at, row.ended_at, row.busy_s
            )
    if recording.rounds:
        recording.weights = networks.searched_weights(connection, session_id)
        trials = (
            sa.select(*of_job, sa.func.min(TrialRow.time_ms).label("best_ms"))
            .join(TrialRow, TrialRow.job_id == Job.id)
            .join(SolverRow, SolverRow.id == Job.solver_id)
            .where(
                Job.session_id == session_id,
                Job.search_id.is_not(None),
                TrialRow.cause.is_(None),
                TrialRow.time_ms > 0,
            )
            .group_by(*of_job)
        )
        for best in connection.execute(trials):
            search = _Search(best.search_id, best.config_id, best.solver, best.steps, best.options)
            recording.best_ms[search][best.round] = best.best_ms
    return recording


def _seconds(started_at: datetime | None, ended_at: datetime | None, busy_s: float) -> float:
    """Return how long an attempt held its process."""
    return max(0.0, (ended_at - started_at).total_seconds()) if started_at and ended_at else busy_s
