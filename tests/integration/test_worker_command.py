"""`tuna worker` as a program: how it starts its workers, and how they end."""

from __future__ import annotations

import contextlib
import os
import signal
import time
from collections.abc import Callable
from pathlib import Path

import psutil
import pytest
import sqlalchemy as sa
from jobs_builder import accepted, make_jobs, states
from processes import Processes, below
from queries import execute, read_value
from settings_changes import change_setting

from tuna.db.engine import writing
from tuna.db.models import Job

Eventually = Callable[[Callable[[], object], float], None]


@pytest.fixture(autouse=True)
def _lasting_leases(engine: sa.Engine, monkeypatch: pytest.MonkeyPatch) -> None:
    """No worker dies here, and on a busy machine a heartbeat comes late."""
    change_setting(monkeypatch, "TUNA_LEASE_S", "60")


#: A package's vendor of devices, which finds two cards.
CARDS = """
from tuna.sandbox.discovery import Device, Vendor, narrow
CARDS = [Device("card", "card", number, variables={"CARDS": str(number)}) for number in range(2)]
VENDOR = Vendor(lambda _, __, environ: narrow(CARDS, environ.get("CARDS")), ("CARDS",))
"""


def _workers(process: psutil.Popen) -> list[psutil.Process]:
    """The Celery workers that `tuna worker` started, without their pools."""
    found = []
    for child in process.children():
        with contextlib.suppress(psutil.NoSuchProcess):
            found += [child] if "celery" in child.cmdline() else []
    return found


def _failures(engine: sa.Engine) -> int:
    return read_value(engine, sa.select(sa.func.sum(Job.failures)))


def test_once_leaves_when_the_work_is_done_with_hooks_and_artifacts_where_the_coordinator_says(
    engine: sa.Engine,
    processes: Processes,
    eventually: Eventually,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    make_jobs(engine, 1, steps="build")
    with monkeypatch.context() as there:
        there.setenv("TUNA_ARTIFACTS_URL", (tmp_path / "mount").as_uri())
        coordinator = processes.coordinator()
    eventually(lambda: states(engine) == {"compile_queued": 10}, 120)
    monkeypatch.setenv("TUNA_BEFORE_WORKER", f"sh -c 'echo before >> {tmp_path}/said'")
    monkeypatch.setenv("TUNA_AFTER_WORKER", f"sh -c 'echo after >> {tmp_path}/said'")
    assert processes.start("tuna", "worker", "compile", "--once").wait(200) == 0
    assert (tmp_path / "said").read_text().split() == ["before", "after"]
    assert coordinator.wait(200) == 0
    assert states(engine) == {"compiled": 10}
    assert _failures(engine) == 0


def test_what_ends_within_the_bound_is_finished(
    engine: sa.Engine, processes: Processes, eventually: Eventually
) -> None:
    make_jobs(engine, 1, steps="build", options={"sleep_s": 0.5})
    processes.coordinator()
    worker = processes.start("tuna", "worker", "compile", "-c", "1")
    eventually(lambda: states(engine) == {"compiling": 10}, 120)
    worker.send_signal(signal.SIGTERM)
    assert worker.wait(200) == 0
    eventually(lambda: states(engine) == {"compiled": 10}, 120)


def test_what_does_not_is_given_back_and_costs_no_attempt(
    engine: sa.Engine, processes: Processes, eventually: Eventually, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("TUNA_SHUTDOWN_S", "1")
    make_jobs(engine, 1, steps="build", options={"sleep_s": 2.0})
    processes.coordinator()
    worker = processes.start("tuna", "worker", "compile")
    eventually(lambda: states(engine).get("compiled", 0) > 0, 120)  # in the second of ten
    worker.send_signal(signal.SIGTERM)
    assert worker.wait(200) == 0
    eventually(lambda: set(states(engine)) == {"compiled", "compile_queued"}, 120)
    assert _failures(engine) == 0
    with writing(engine) as connection:
        assert connection.execute(sa.select(sa.func.sum(Job.isolate))).scalar_one() == 0
        connection.execute(sa.update(Job).values(options={}))
    second = processes.start("tuna", "worker", "compile")
    eventually(lambda: states(engine).get("compiled", 0) >= 2, 120)
    second.send_signal(signal.SIGTERM)
    second.wait(200)
    assert {count for *_, count in accepted(engine)} == {1}


def test_where_the_artifacts_are_not_mounted_work_is_refused_and_no_job_is_charged(
    engine: sa.Engine,
    processes: Processes,
    eventually: Eventually,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    make_jobs(engine, 1, steps="build")
    coordinator = processes.coordinator()
    with monkeypatch.context() as there:
        there.setenv("TUNA_ARTIFACTS_URL", (tmp_path / "mount").as_uri())
        processes.start("tuna", "worker", "compile")
    log = tmp_path / "home" / "log"
    eventually(lambda: log.read_text().count("is it mounted on this machine?") >= 2, 120)
    assert states(engine).keys() & {"compiled", "errored"} == set()
    (tmp_path / "mount").mkdir()
    (tmp_path / "mount" / "tuna-artifacts").touch()
    assert coordinator.wait(200) == 0
    assert states(engine) == {"compiled": 10}
    assert _failures(engine) == 0


def test_the_second_interrupt_ends_at_once(
    engine: sa.Engine, processes: Processes, eventually: Eventually, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("TUNA_SHUTDOWN_S", "1000")
    make_jobs(engine, 1, steps="build", options={"sleep_s": 100})
    processes.coordinator()
    worker = processes.start("tuna", "worker", "compile")
    eventually(lambda: states(engine) == {"compiling": 10}, 120)
    started = below(worker)
    worker.send_signal(signal.SIGINT)
    ended = None
    for _ in range(10):  # a busy machine may take two signals for one
        time.sleep(0.5)  # a person's second Ctrl-C comes later than the first
        assert worker.is_running()
        worker.send_signal(signal.SIGINT)
        with contextlib.suppress(psutil.TimeoutExpired):
            ended = worker.wait(12)
            break
    assert ended == 0
    eventually(lambda: states(engine) == {"compile_queued": 10}, 120)
    psutil.wait_procs(started, timeout=60)
    assert not [process for process in started if process.is_running()]
    assert _failures(engine) == 0


def test_an_interrupted_run_gives_back_what_it_has(
    engine: sa.Engine, processes: Processes, eventually: Eventually, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("TUNA_SHUTDOWN_S", "1")
    make_jobs(engine, 1, steps="build", options={"sleep_s": 100})
    run = processes.start("tuna", "run", "--session-id", "1", "--compile-processes", "1")
    eventually(lambda: states(engine) == {"compiling": 10}, 120)
    run.send_signal(signal.SIGINT)
    assert run.wait(200) == 130
    assert states(engine) == {"new": 10}
    assert _failures(engine) == 0


@pytest.mark.skipif(len(os.sched_getaffinity(0)) < 2, reason="two devices need two cores")
def test_each_device_has_a_worker_that_sees_no_other(
    processes: Processes, tmp_path: Path, eventually: Eventually, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "cards.py").write_text(CARDS)
    described = tmp_path / "cards-1.dist-info"
    described.mkdir()
    (described / "METADATA").write_text("Metadata-Version: 2.1\nName: cards\nVersion: 1\n")
    (described / "entry_points.txt").write_text("[tuna.devices]\ncards = cards:VENDOR\n")
    monkeypatch.setenv("PYTHONPATH", str(tmp_path), prepend=os.pathsep)
    worker = processes.start("tuna", "worker", "eval", "--devices", "all", forked=False)
    eventually(
        lambda: len(_workers(worker)) == 2 and all(w.children() for w in _workers(worker)), 60
    )
    variables = [process.environ() for process in _workers(worker)]
    assert {found["CARDS"] for found in variables} == {"0", "1"}
    assert len({found["TUNA_EVAL_CPUS"] for found in variables}) == 2
    names = {process.cmdline()[process.cmdline().index("-n") + 1] for process in _workers(worker)}
    assert len(names) == 2
    victim = _workers(worker)[0]
    victim.kill()
    eventually(
        lambda: victim.pid not in {w.pid for w in _workers(worker)} and len(_workers(worker)) == 2,
        120,
    )
    worker.send_signal(signal.SIGTERM)
    assert worker.wait(200) == 0


def test_a_worker_refuses_a_session_of_another_environment(
    engine: sa.Engine, processes: Processes, tuna_home: Path
) -> None:
    make_jobs(engine, 1)
    execute(engine, sa.text("UPDATE environment SET arch = 'gfx942', num_cu = 304"))
    assert processes.start("tuna", "worker", "eval", "--session-id", "1").wait(200) == 2
    assert (
        "architecture gfx942, here none; compute units 304, here 0"
        in (tuna_home / "log").read_text()
    )


def test_a_failing_hook_keeps_the_worker_from_starting(
    engine: sa.Engine, processes: Processes, tuna_home: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("TUNA_BEFORE_WORKER", "sh -c 'echo the card is too hot; exit 3'")
    assert processes.start("tuna", "worker", "compile").wait(200) == 5
    assert (
        "TUNA_BEFORE_WORKER failed with exit code 3. the card is too hot"
        in (tuna_home / "log").read_text()
    )
