"""Searches through the real, installed pipeline on a device that sleeps.

Run as a program, in a TUNA_HOME of its own, it is the coordinator, and prints the stages that ended
as JSON.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path

import sqlalchemy as sa

from benchmarks.simulated_device import DURATIONS, SimulatedDevice, SimulatedRounds, install
from tests.private_servers import wait_until
from tuna.common import logs
from tuna.configs import GemmConfig
from tuna.coordinator.coordinator import Coordinator
from tuna.coordinator.policies import Policy, Share, Snapshot
from tuna.coordinator.publisher import Backends
from tuna.db import configs, database, jobs, sessions, solvers
from tuna.db.engine import make_engine, reading, writing
from tuna.db.models import Job, Search, StepResultRow
from tuna.jobs.serving import SessionWork, read_works
from tuna.libraries.steps import every_step
from tuna.queue.announcements import NAMESPACES_KEY
from tuna.queue.connection import connect, ensure_services, make_celery, release_services
from tuna.settings import Settings, get_settings
from tuna.vocabulary import IN_FLIGHT
from tuna.workers.launch import WorkerSpec, local_workers
from tuna_simulate.policies import POLICIES

_START_S = 120.0
#: Seconds of each stage of each round of each search.
Durations = Sequence[Sequence[Sequence[float]]]


@dataclass(frozen=True)
class EndedStage:
    """A stage of a round; times are seconds since the coordinator began, with workers ready."""

    search: int
    round: int
    step: str
    started_s: float
    ended_s: float


def run(
    durations: Durations, policy: str, *, scale: float, look_ahead: int, late: bool
) -> list[EndedStage]:
    """Run a search for each of `durations` and return the stages in the order of their ends.

    Real stages take `scale` times as long. There is one process for the CPU steps and one for the
    device. `late`: nothing is published before a process is free.
    """
    # A socket's path must be short.
    with tempfile.TemporaryDirectory(prefix="tuna-bench-", dir="/tmp") as name:
        others = {
            key: value
            for key, value in os.environ.items()
            if not key.startswith(("TUNA_", "CELERY_"))
        }
        variables = install(Path(name), durations, scale) | {"TUNA_HOME": name, "TMPDIR": name}
        words = ["--policy", policy, "--look-ahead", str(look_ahead), *(["--late"] if late else [])]
        command = [sys.executable, "-m", "benchmarks.schedule_pipeline", *words]
        result = subprocess.run(
            command, env=others | variables, stdout=subprocess.PIPE, text=True, check=False
        )
        if result.returncode:
            raise SystemExit(
                f"The coordinator of the benchmark failed with exit code {result.returncode}."
            )
        return [EndedStage(**one) for one in json.loads(result.stdout)]


def coordinate() -> int:
    """A session with one search for each of the durations, all at once."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--policy", required=True, choices=sorted(POLICIES))
    parser.add_argument("--look-ahead", type=int, required=True)
    parser.add_argument("--late", action="store_true")
    options = parser.parse_args()
    logs.configure("WARNING", "console")
    SimulatedRounds.look_ahead = lambda *_: options.look_ahead  # type: ignore[method-assign]
    settings = get_settings()
    engine = make_engine(settings.sql_url)
    database.upgrade(engine)
    count = len(json.loads(Path(os.environ[DURATIONS]).read_text()))
    ids = [_make_session(engine, f"search {number}") for number in range(count)]
    ensure_services(settings)
    try:
        stages = _coordinate(engine, settings, ids, POLICIES[options.policy], late=options.late)
    finally:
        release_services(settings)
    print(json.dumps([asdict(stage) for stage in stages]))
    return 0


def _coordinate(
    engine: sa.Engine, settings: Settings, ids: Sequence[int], policy: Policy, *, late: bool
) -> list[EndedStage]:
    with reading(engine) as connection:
        works = read_works(connection, ids)
    if late:
        policy = replace(policy, decide=_Late(engine, works[0], policy))
    client, celery = connect(settings), make_celery(settings)
    backends = Backends(engine, client, celery, settings)
    coordinator = Coordinator(backends, works, policy=policy, fixed_workers=True)
    # Workers report to the databases named there; the coordinator names its own when it first
    # publishes, which is after them.
    with reading(engine) as connection:
        client.sadd(NAMESPACES_KEY, sessions.namespace(connection))
    with local_workers(
        settings.home / "logs", [WorkerSpec("compile"), WorkerSpec("eval")]
    ) as workers:
        wait_until(
            lambda: len(list(client.scan_iter("tuna:*:worker:*"))) == 2,
            _START_S,
            "start of the workers",
        )
        begun_s = time.time()
        coordinator.run(workers.check, lambda: _all_ended(engine))
    return _ended_stages(engine, ids, begun_s)


class _Late:
    """A policy without look-ahead, as in the thesis: it waits for the chunk in flight."""

    def __init__(self, engine: sa.Engine, work: SessionWork, policy: Policy) -> None:
        self._engine, self._policy = engine, policy
        # the same of all sessions
        self._queues = {step.name: work.queue(step) for step in every_step(work.library)}

    def __call__(self, snapshot: Snapshot, /) -> list[Share]:
        flying = Job.state.in_([state.value for state in IN_FLIGHT])
        query = (
            sa.select(Job.session_id, Job.step, sa.func.count())
            .where(flying)
            .group_by(Job.session_id, Job.step)
        )
        with reading(self._engine) as connection:
            in_flight = {
                (session_id, step): count for session_id, step, count in connection.execute(query)
            }
        occupied: Counter[str] = Counter()
        for (_, step), count in in_flight.items():
            occupied[self._queues[step]] += count
        rounds_alone = [step for step in snapshot.open if step.jobs]  # there are no other jobs
        seen = replace(
            snapshot,
            open=rounds_alone,
            waiting=occupied,
            per_process=1,
            queued_per_process={},
            in_flight=in_flight,
        )
        return self._policy(seen)


def _make_session(engine: sa.Engine, reason: str) -> int:
    library = SimulatedDevice()
    with writing(engine) as connection:
        session_id, _ = sessions.create(connection, library.environment(), reason)
        configs.store(connection, [GemmConfig(m=8, n=8, k=8)], "t")
        solvers.update_solvers(connection, library)
    solvers.update_applicability(engine, library, session_id, "t")
    first = library.solvers()[0].name
    request = jobs.JobRequest(
        session_id,
        library.name,
        [step.name for step in library.steps],
        reason,
        "new",
        tag="t",
        solvers=[first],
        searched=[first],
        search=library.search.step.name,
    )
    with writing(engine) as connection:
        if jobs.load(connection, request) != 1:
            raise SystemExit("A session of the benchmark has not one search.")
    return session_id


def _all_ended(engine: sa.Engine) -> bool:
    last = SimulatedDevice.steps[-1].name
    goes_on = sa.or_(Job.step != last, Job.state != "compiled", Search.stopped.is_(None))
    unfinished = sa.select(Job.id).outerjoin(Search, Search.id == Job.search_id)
    with reading(engine) as connection:
        if connection.execute(sa.select(Job.id).where(Job.state == "errored").limit(1)).first():
            raise SystemExit("A round of the benchmark failed.")
        return connection.execute(unfinished.where(goes_on).limit(1)).first() is None


def _ended_stages(engine: sa.Engine, ids: Sequence[int], begun_s: float) -> list[EndedStage]:
    times = (StepResultRow.started_at, StepResultRow.ended_at)
    query = sa.select(Job.session_id, Job.round, StepResultRow.step, *times).join(
        Job, Job.id == StepResultRow.job_id
    )
    with reading(engine) as connection:
        rows = connection.execute(query.order_by(StepResultRow.ended_at)).all()
    return [
        EndedStage(
            ids.index(session_id),
            number,
            step,
            begin.timestamp() - begun_s,
            end.timestamp() - begun_s,
        )
        for session_id, number, step, begin, end in rows
        if begin and end
    ]


if __name__ == "__main__":
    raise SystemExit(coordinate())
