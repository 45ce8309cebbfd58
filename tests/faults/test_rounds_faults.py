"""Searches of 8 rounds whose third loses its worker or its coordinator: the trials are those of an
undisturbed run."""

from __future__ import annotations

import os
import random
import re
import signal
import time
from collections import defaultdict
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

import pytest
import sqlalchemy as sa
from cluster import LEASE_S, OTHER_EVAL, Cluster
from private_servers import wait_until
from queries import read_rows
from search_library import ROUNDS, SearchLibrary, expected, hold_name

from tuna.configs import GemmConfig, parse_line
from tuna.db import configs, database, jobs, models, sessions, solvers
from tuna.db.engine import make_engine, reading, writing
from tuna.db.models import Job, Search, StepResultRow
from tuna.queue.heartbeat import HeartbeatBoard
from tuna.queue.leases import Leases
from tuna.vocabulary import State

LIBRARY = SearchLibrary()
STEPS = ("search", "build", "measure")
_SOLVERS = ("Noop0", "Noop1", "Noop2")
_LAYERS = 2
_ALL = [(layer + 1, solver) for layer in range(_LAYERS) for solver in _SOLVERS]
_THIRD = 2  # rounds are counted from 0
_POLL_S = 0.02
_END_S = 150.0
_WORKER = {"search": "compile", "build": "compile", "measure": "eval"}
_RUNNING = (State.COMPILING.value, State.EVALUATING.value)


@dataclass(frozen=True)
class Fault:
    """What happens while the third round of a search is at a step, which goes on when it has
    happened."""

    victim: tuple[int, str]  #: layer and solver
    step: str
    #: `child` and `worker` are killed, so is the `coordinator`; `pause` of the process that does
    #: the step
    how: str
    lasts_s: float

    @property
    def hold(self) -> str:
        layer, solver = self.victim
        return hold_name(self.step, solver, layer, _THIRD)


class Scene:
    """A cluster with a session of searches."""

    def __init__(
        self,
        cluster: Cluster,
        engine: sa.Engine,
        layers: int = _LAYERS,
        solvers_: Sequence[str] = _SOLVERS,
        workers: Sequence[str] = ("compile", "eval"),
    ) -> None:
        self.cluster, self.engine, self._workers, self._solvers = cluster, engine, workers, solvers_
        self._devices = len(workers) - 1
        self._due: list[tuple[float, Callable[[], object]]] = []
        database.upgrade(engine)
        made = [GemmConfig(m=8, n=8, k=number + 1) for number in range(layers)]
        with writing(engine) as connection:
            session_id, _ = sessions.create(connection, LIBRARY.environment(), "drill")
            configs.store(connection, made, "t")
            solvers.update_solvers(connection, LIBRARY)
            namespace = sessions.namespace(connection)
        solvers.update_applicability(engine, LIBRARY, session_id, "t")
        with writing(engine) as connection:
            request = jobs.JobRequest(
                session_id, LIBRARY.name, STEPS[1:], "drill", "new", tag="t",
                solvers=solvers_, searched=solvers_, search="search",
            )  # fmt: skip
            assert jobs.load(connection, request) == layers * len(solvers_)
        self._leases = Leases(cluster.client(), namespace, LEASE_S)
        self._board = HeartbeatBoard(cluster.client(), namespace, LEASE_S)
        self.late: set[str] = set()  #: chunks whose process was stopped

    def work_through(self, faults: Sequence[Fault]) -> None:
        """Let each fault come about; then wait for the end."""
        for fault in faults:
            (self.cluster.folder / "hold" / fault.hold).touch()
        first = self.cluster.folder / "hold" / hold_name("search", self._solvers[0], 1, 0)
        first.touch()  # nothing is measured before all devices are there
        for name in (*self._workers, "coordinator"):
            self.cluster.start(name)
        wait_until(
            lambda: len(self._board.live()) == len(self._workers),
            _END_S,
            "heartbeats of the workers",
        )
        first.unlink()
        left = list(faults)
        deadline = time.monotonic() + _END_S
        while left or self._due:
            assert time.monotonic() < deadline, f"{left} did not come about"
            for due in [one for one in self._due if one[0] <= time.monotonic()]:
                self._due.remove(due)
                due[1]()
            left = [fault for fault in left if not self._inject(fault)]
            time.sleep(_POLL_S)
        wait_until(self._ended, _END_S, "end of the session")

    def _inject(self, fault: Fault) -> bool:
        """Whether it was the time for it."""
        chunk = self._chunk(fault)
        pid = self._holder(chunk) if chunk else None
        if pid is None:
            return False
        if fault.how == "pause":
            self.late.add(str(chunk))
            os.kill(pid, signal.SIGSTOP)
            self._later(fault.lasts_s, lambda: os.kill(pid, signal.SIGCONT))
        elif fault.how == "child":
            os.kill(pid, signal.SIGKILL)
        else:
            name = "coordinator" if fault.how == "coordinator" else self.cluster.owner(pid)
            self.cluster.kill(name)
            self._later(fault.lasts_s, lambda: self.cluster.start(name))
        (self.cluster.folder / "hold" / fault.hold).unlink()
        return True

    def _chunk(self, fault: Fault) -> str | None:
        """The chunk in which the step is done."""
        layer, solver = fault.victim
        query = (
            sa.select(Job.chunk, Job.step, Job.state)
            .join(models.SolverRow, models.SolverRow.id == Job.solver_id)
            .where(Job.round == _THIRD)
            .where(models.SolverRow.name == solver, Job.config_id == layer)
        )
        parts = read_rows(self.engine, query)
        running = [row.chunk for row in parts if row.step == fault.step and row.state in _RUNNING]
        expected = min(len(parts), self._devices) if fault.step == "measure" else 1
        return running[0] if len(running) >= max(1, expected) else None

    def _holder(self, chunk: str) -> int | None:
        """The process that has its lease."""
        token = self.cluster.client().hget(self._leases.holders_key, chunk)
        return int(re.fullmatch(rb".*:(\d+)/.*", token)[1]) if token else None  # type: ignore[index]

    def _later(self, seconds: float, what: Callable[[], object]) -> None:
        self._due.append((time.monotonic() + seconds, what))

    def _ended(self) -> bool:
        for name in self._workers:
            assert self.cluster.exit_code(name) is None, self.cluster.log_tail(name)
        assert self.cluster.exit_code("coordinator") in (None, 0), self.cluster.log_tail(
            "coordinator"
        )
        return self.cluster.exit_code("coordinator") == 0

    def trials(self) -> set[tuple[int, str, int, int, str]]:
        """(layer, solver, round, number, params) of all trials."""
        trial, solver = models.TrialRow, models.SolverRow
        query = sa.select(Job.config_id, solver.name, Job.round, trial.number, trial.params)
        query = (
            query.select_from(trial)
            .join(Job, Job.id == trial.job_id)
            .join(solver, solver.id == Job.solver_id)
        )
        rows = [tuple(row) for row in read_rows(self.engine, query)]
        assert len(rows) == len(set(rows))
        return set(rows)  # type: ignore[arg-type]

    def expected(self) -> set[tuple[int, str, int, int, str]]:
        layers = read_rows(self.engine, sa.select(models.ConfigRow.id, models.ConfigRow.driver))
        return {
            (layer, solver, round_, number, params)
            for layer, driver in layers
            for solver in self._solvers
            for round_, batch in enumerate(expected(solver, parse_line(driver)[0].to_json()))
            for number, params in enumerate(batch)
        }

    def objections(self) -> list[str]:
        """What is wrong at the end; the trials apart.

        A round may be measured in parts, each a job: until a killed worker's heartbeat is old, it
        and the one in its place are two devices.
        """
        with reading(self.engine) as connection:
            rows = connection.execute(
                sa.select(Job.id, Job.search_id, Job.round, Job.state).order_by(Job.id)
            ).all()
            ends = connection.execute(sa.select(Search.stopped)).scalars().all()
            good = sa.select(StepResultRow.job_id, StepResultRow.step, sa.func.count()).where(
                StepResultRow.ok.is_(True)
            )
            counts = {
                (job, step): count
                for job, step, count in connection.execute(
                    good.group_by(StepResultRow.job_id, StepResultRow.step)
                )
            }
        rounds = defaultdict(list)
        for row in rows:
            rounds[row.search_id, row.round].append(row.id)
        found = [f"{len(rounds)} rounds"] if len(rounds) != len(_ALL) * ROUNDS else []
        found += [f"job {row.id} is {row.state}" for row in rows if row.state != "evaluated"]
        found += [f"a search ended for {why}" for why in ends if why != f"{ROUNDS} rounds"]
        # what comes before the division is of the first part
        wanted = [
            (job, step, int(step == STEPS[-1] or job == parts[0]))
            for parts in rounds.values()
            for job in parts
            for step in STEPS
        ]
        return found + [
            f"job {job} has {counts.get((job, step), 0)} accepted results of {step}"
            for job, step, count in wanted
            if counts.get((job, step), 0) != count
        ]

    def lost(self) -> list[tuple[int, str]]:
        """(round, step) of the attempts that were lost with their worker."""
        query = sa.select(Job.round, StepResultRow.step).join(Job, Job.id == StepResultRow.job_id)
        return [
            tuple(row)
            for row in read_rows(self.engine, query.where(StepResultRow.cause == "worker_lost"))
        ]  # type: ignore[misc]


def _run(folder: Path, faults: Sequence[Fault], check: Callable[[Scene], None]) -> None:
    with Cluster(folder) as cluster:
        engine = make_engine(cluster.db_url)
        try:
            scene = Scene(cluster, engine)
            scene.work_through(faults)
            assert scene.objections() == []
            assert scene.trials() == scene.expected()
            check(scene)
        finally:
            engine.dispose()


@pytest.mark.drill(only=True)
@pytest.mark.parametrize("seed", range(1, 11))
def test_kills_in_the_middle_of_the_third_round_change_no_trial(
    seed: int, tmp_path: Path, knows_machine: Callable[[Path], None]
) -> None:
    knows_machine(tmp_path / "home")
    rng = random.Random(seed)
    targets = [
        *((step, rng.choice(["child", "worker"])) for step in STEPS),
        (rng.choice(STEPS), "coordinator"),
    ]
    faults = [
        Fault(victim, step, how, rng.uniform(0.3, 3.0))
        for victim, (step, how) in zip(rng.sample(_ALL, len(targets)), targets, strict=True)
    ]

    def check(scene: Scene) -> None:
        assert set(STEPS) <= {step for _, step in scene.lost()}, faults

    _run(tmp_path, faults, check)


@pytest.mark.drill(only=True)
@pytest.mark.parametrize("step", STEPS)
def test_a_third_round_that_comes_after_its_lease_is_refused_once(
    step: str, tmp_path: Path, knows_machine: Callable[[Path], None]
) -> None:
    knows_machine(tmp_path / "home")

    def check(scene: Scene) -> None:
        assert (_THIRD, step) in scene.lost()
        (chunk,) = scene.late
        log = (tmp_path / "logs" / f"{_WORKER[step]}.log").read_text().splitlines()
        assert [chunk in line for line in log if "lease lost" in line].count(True) == 1

    _run(tmp_path, [Fault((1, "Noop1"), step, "pause", 2 * LEASE_S)], check)


@pytest.mark.drill(only=True)
@pytest.mark.parametrize("how", ["child", "worker", "coordinator"])
def test_two_devices_share_each_round_and_one_is_killed_in_the_third(
    how: str, tmp_path: Path, knows_machine: Callable[[Path], None]
) -> None:
    knows_machine(tmp_path / "home")
    with Cluster(tmp_path) as cluster:
        engine = make_engine(cluster.db_url)
        try:
            scene = Scene(cluster, engine, 1, ("Noop0",), ("compile", "eval", OTHER_EVAL))
            scene.work_through([Fault((1, "Noop0"), "measure", how, 1.0)])
            assert scene.trials() == scene.expected()
            with reading(engine) as connection:
                rows = connection.execute(sa.select(Job.id, Job.round, Job.part, Job.state)).all()
                good = sa.select(StepResultRow.job_id).where(
                    StepResultRow.ok.is_(True), StepResultRow.step == "measure"
                )
                measured = connection.execute(good).scalars().all()
            assert {row.state for row in rows} == {"evaluated"}
            assert sorted(measured) == sorted(row.id for row in rows), "each part is measured once"
            assert any(row.part for row in rows)
            assert how == "coordinator" or (_THIRD, "measure") in scene.lost()
        finally:
            engine.dispose()
