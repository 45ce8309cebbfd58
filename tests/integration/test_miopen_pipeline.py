"""Many jobs of the miopen library through real workers, with processes killed on the way."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator
from pathlib import Path

import psutil
import pytest
import redis
import sqlalchemy as sa
from fin_double import fin_kernels, fin_problem, fin_solvers
from jobs_builder import accepted, states
from processes import Processes, below
from shared_data import DRILLS

from tuna.configs import ConvConfig, parse_line
from tuna.db import configs, jobs, sessions, solvers
from tuna.db.engine import reading, writing
from tuna.db.models import ConfigRow, FindDb, FindDbKernel, Job, SolverRow, StepResultRow, TrialRow
from tuna.libraries.miopen import fin_protocol
from tuna.libraries.registry import get_library
from tuna.services import embedded_redis
from tuna.settings import get_settings

Eventually = Callable[[Callable[[], object], float], None]
JOBS, VICTIMS = (
    (60, ["compile", "eval", "coordinator"])
    if DRILLS == 1
    else (2000, [*2 * ["compile", "eval"], "coordinator"])
)
FIND = ["miopen_find_compile", "miopen_find_eval"]


def layers(count: int) -> Iterator[str]:
    """Distinct convolutions, forward and backward."""
    for number in range(count):
        shape = (
            f"-n {1 + number % 16} -c {16 * (1 + number % 7)} -H {7 + number} -W 14 -k 32 -y 3 -x 3"
            " -p 1 -q 1"
        )
        yield f"MIOpenDriver conv {shape} -F {1 + number % 2}"


def load(engine: sa.Engine, count: int) -> int:
    """A session with find jobs of at least `count` pairs; returns the number of jobs."""
    library = get_library("miopen")
    with writing(engine) as connection:
        session_id, _ = sessions.create(connection, library.environment(), "test")
        configs.store(connection, [parse_line(line)[0] for line in layers(count // 7)], "t")
        solvers.update_solvers(connection, library)
    found = solvers.update_applicability(engine, library, session_id, "t")
    assert not found.unknown
    with writing(engine) as connection:
        request = jobs.JobRequest(session_id, "miopen", FIND, "test", "new", tag="t")
        return jobs.load(connection, request)


def time_of(driver: str, solver: str, params: str) -> float:
    """What the double of fin measures."""
    config = parse_line(driver)[0]
    assert isinstance(config, ConvConfig)
    problem = fin_problem.Problem(fin_protocol.config_fields(config))
    return fin_kernels.time_ms(fin_solvers.BY_NAME[solver], problem, params)


@pytest.mark.drill
def test_jobs_survive_kills_of_everything(
    engine: sa.Engine,
    processes: Processes,
    eventually: Eventually,
    rocm: Callable[..., Path],
) -> None:
    rocm()
    total = load(engine, JOBS)
    assert total >= JOBS
    running = {name: processes.worker(name) for name in ("compile", "eval")}
    running["coordinator"] = processes.coordinator()
    for number, victim in enumerate(VICTIMS, 1):  # each when a twelfth more of the jobs is done
        done = total * number // 12
        eventually(lambda: states(engine).get("evaluated", 0) >= done, 120)  # noqa: B023
        children = below(running[victim])
        processes.kill(running[victim])
        if victim != "coordinator":
            psutil.wait_procs(children, timeout=60)
            assert not [child for child in children if child.is_running()], (
                "fin outlived its worker"
            )
        running[victim] = (
            processes.coordinator() if victim == "coordinator" else processes.worker(victim)
        )
    # costs the work in flight alone
    redis.Redis.from_url(embedded_redis.url(get_settings().run_dir)).flushall()
    eventually(lambda: set(states(engine)) <= {"evaluated", "errored"}, 240)
    assert running["coordinator"].wait(200) == 0
    _check(engine, total)


def _check(engine: sa.Engine, total: int) -> None:
    """Nothing lost, nothing doubled, nothing claimed that was not done."""
    assert states(engine) == {"evaluated": total}
    assert len(accepted(engine)) == 2 * total
    assert {count for *_, count in accepted(engine)} == {1}
    with reading(engine) as connection:
        assert (
            connection.execute(sa.select(sa.func.count()).select_from(FindDb)).scalar_one() == total
        )
        built = (
            sa.select(sa.func.count())
            .select_from(TrialRow)
            .where(TrialRow.artifact.is_not(None), TrialRow.cause.is_(None))
        )
        assert connection.execute(built).scalar_one() == total
        causes = set(connection.execute(sa.select(StepResultRow.cause).distinct()).scalars())
        assert causes <= {None, "worker_lost"}
        # A time says which problem, solver and params it was measured for: no result is another
        # job's.
        pairs = connection.execute(
            sa.select(FindDb.time_ms, FindDb.params, ConfigRow.driver, SolverRow.name)
            .join(ConfigRow, ConfigRow.id == FindDb.config_id)
            .join(SolverRow, SolverRow.id == FindDb.solver_id)
        ).all()
        assert len({(row.driver, row.name) for row in pairs}) == total
        for row in pairs:
            assert row.time_ms == time_of(row.driver, row.name, row.params)
        without = (
            sa.select(sa.func.count())
            .select_from(FindDb)
            .outerjoin(FindDbKernel)
            .where(FindDbKernel.number.is_(None))
        )
        gemm = (
            sa.select(sa.func.count()).select_from(FindDb).where(FindDb.algorithm.endswith("GEMM"))
        )
        assert connection.execute(without).scalar_one() <= connection.execute(gemm).scalar_one()
        assert (
            json.dumps(connection.execute(sa.select(Job.cause).distinct()).scalars().all())
            == "[null]"
        )
