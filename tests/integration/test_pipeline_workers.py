"""The whole pipeline with real Celery workers and a real Redis, and what it survives."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import psutil
import pytest
import redis
import sqlalchemy as sa
from jobs_builder import accepted, make_jobs, states, trials
from private_servers import rabbitmq_server, redis_server
from processes import Processes, below
from shared_data import needed_program

from tuna.coordinator.coordinator import ALIVE
from tuna.db.engine import writing
from tuna.db.models import Job
from tuna.queue.connection import connect
from tuna.services import embedded_redis
from tuna.settings import get_settings

Eventually = Callable[[Callable[[], object], float], None]


def test_a_session_runs_to_its_end_and_a_second_run_does_nothing(
    engine: sa.Engine, processes: Processes
) -> None:
    make_jobs(engine, 20, options={"trials": 1})
    assert processes.start("tuna", "run", "--session-id", "1").wait(200) == 0
    assert states(engine) == {"evaluated": 200}
    assert len(accepted(engine)) == 400
    assert {count for *_, count in accepted(engine)} == {1}
    assert trials(engine) == 200
    assert processes.start("tuna", "run", "--session-id", "1").wait(200) == 0
    assert len(accepted(engine)) == 400


def test_a_coordinator_that_stays_serves_a_session_that_is_made_later_and_ends_by_sigterm(
    engine: sa.Engine, processes: Processes, eventually: Eventually
) -> None:
    stays = processes.start("tuna", "enqueue", "--all", "--stay")
    for name in ("compile", "eval"):
        processes.worker(name)
    alive = get_settings().home / ALIVE
    eventually(alive.exists, 60)
    make_jobs(engine, 2, options={"trials": 1})
    eventually(lambda: states(engine) == {"evaluated": 20}, 60)
    for _ in range(5):  # as the kernel does when a parent with five threads is killed
        stays.terminate()
    assert stays.wait(60) == 0
    client = connect(get_settings())
    assert not list(client.scan_iter("*:lease*")), "it left no lease"


def test_a_job_that_kills_its_worker_errs_alone(
    engine: sa.Engine, processes: Processes, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("TUNA_MAX_ATTEMPTS", "2")
    make_jobs(engine, 1, steps="build", options={"kill": "Noop4"})
    assert processes.start("tuna", "run", "--session-id", "1").wait(200) == 1
    assert states(engine) == {"compiled": 9, "errored": 1}
    with engine.connect() as connection:
        assert set(
            connection.execute(sa.select(Job.cause).where(Job.state == "errored")).scalars()
        ) == {"worker_lost"}
    said = (get_settings().home / "log").read_text()
    assert "1 job failed, most often by worker_lost: " in said
    assert "all reasons: `tuna status --session-id 1`" in said


@pytest.mark.drill(only=True)  # otherwise test_miopen_pipeline.py and tests/faults show it
@pytest.mark.parametrize("victim", ["compile", "eval", "coordinator"])
def test_what_is_killed_in_the_middle_is_made_good(
    engine: sa.Engine, processes: Processes, eventually: Eventually, victim: str
) -> None:
    make_jobs(engine, 12, options={"trials": 1, "sleep_s": 0.02})
    running = {name: processes.worker(name) for name in ("compile", "eval")}
    running["coordinator"] = processes.coordinator()
    begun = "evaluated" if victim == "eval" else "compiled"
    eventually(
        lambda: any(
            state.startswith(begun[:5]) for state in states(engine) if state != "compile_queued"
        ),
        60,
    )
    children = below(running[victim])
    processes.kill(running[victim])
    if victim != "coordinator":
        psutil.wait_procs(children, timeout=60)
        assert not [child for child in children if child.is_running()], (
            "a pool process outlived its worker"
        )
    again = processes.coordinator() if victim == "coordinator" else processes.worker(victim)
    eventually(lambda: states(engine) == {"evaluated": 120}, 120)
    assert len(accepted(engine)) == 240
    assert {count for *_, count in accepted(engine)} == {1}
    assert trials(engine) == 120
    assert (again if victim == "coordinator" else running["coordinator"]).wait(200) == 0


@pytest.mark.drill(only=True)  # the same
def test_a_wiped_redis_costs_only_the_work_in_flight(
    engine: sa.Engine, processes: Processes, eventually: Eventually
) -> None:
    make_jobs(engine, 12, options={"trials": 1, "sleep_s": 0.02})
    for name in ("compile", "eval"):
        processes.worker(name)
    processes.coordinator()
    eventually(
        lambda: states(engine).get("compiled", 0) + states(engine).get("evaluated", 0) > 0, 60
    )
    redis.Redis.from_url(embedded_redis.url(get_settings().run_dir)).flushall()
    eventually(lambda: states(engine) == {"evaluated": 120}, 120)
    assert {count for *_, count in accepted(engine)} == {1}


@pytest.mark.drill(only=True)  # test_seed_commands.py has RabbitMQ too
def test_rabbitmq_carries_the_work_too_and_a_killed_worker_is_made_good(
    engine: sa.Engine,
    processes: Processes,
    eventually: Eventually,
    monkeypatch: pytest.MonkeyPatch,
    tmp_path: Path,
) -> None:
    needed_program("rabbitmq-server")
    with (
        redis_server(host="127.0.0.73") as url,
        rabbitmq_server("127.0.0.74", 6379, "tuna", "user", "password"),
    ):
        monkeypatch.setenv("TUNA_BROKER_URL", "amqp://user:password@127.0.0.74:6379/tuna")
        monkeypatch.setenv("TUNA_REDIS_URL", url)
        get_settings.cache_clear()
        make_jobs(engine, 12, options={"trials": 1, "sleep_s": 0.02})
        running = {name: processes.worker(name) for name in ("compile", "eval")}
        coordinator = processes.coordinator()
        eventually(lambda: states(engine).get("evaluated"), 120)
        processes.kill(running["eval"])
        processes.worker("eval")
        assert coordinator.wait(200) == 0
        assert states(engine) == {"evaluated": 120}
        assert {count for *_, count in accepted(engine)} == {1}
        assert trials(engine) == 120
        processes.kill_all()


def test_another_environments_work_is_left_for_those_who_have_it(
    engine: sa.Engine, processes: Processes, eventually: Eventually
) -> None:
    make_jobs(engine, 1, steps="measure")
    with writing(engine) as connection:
        connection.execute(sa.text("UPDATE environment SET arch = 'elsewhere'"))
    worker = processes.worker("eval")
    processes.coordinator()
    eventually(lambda: states(engine) == {"eval_queued": 10}, 30)
    client = connect(get_settings())
    eventually(
        lambda: worker.children() and [client.llen(key) for key in client.keys("eval.*")] == [1], 30
    )
    assert states(engine) == {"eval_queued": 10}
