"""Logs of all trials in parts: what the URL does not take waits on the disk, up to a bound."""

from __future__ import annotations

import contextlib
import gzip
import json
import os
import signal
import subprocess
import sys
import threading
from pathlib import Path
from typing import Any

import psutil
import pytest
import sqlalchemy as sa
from jobs_builder import make_jobs
from private_servers import wait_until

from tuna.artifacts.files import Folder
from tuna.common import restarts
from tuna.db.engine import reading, writing
from tuna.db.models import FindDb, Job, Session, TrialRow
from tuna.errors import ServiceError, StoreUnavailable
from tuna.exports.trial_log import Logged
from tuna.libraries.base import FINALS
from tuna.settings import get_settings
from tuna_trials import trial_parts
from tuna_trials.trial_parts import ProcessTrialLog, TrialParts


def end(engine: sa.Engine, *job_ids: int, trials: int = 2) -> None:
    """End jobs with this many trials each."""
    with writing(engine) as connection:
        connection.execute(sa.update(Job).where(Job.id.in_(job_ids)).values(state="evaluated"))
        rest = {"params": '{"a": 1}', "output_tail": 'it said "no"\n', "step": "measure"}
        rows = [
            {"job_id": one, "number": number, "time_ms": 1.5 + number, "times_ms": "[1.5, 0.1]"}
            for one in job_ids
            for number in range(trials)
        ]
        connection.execute(sa.insert(TrialRow), [row | rest for row in rows])


def lines(folder: Path) -> list[dict[str, Any]]:
    return [
        json.loads(line)
        for path in sorted(folder.glob("trials-*.jsonl.gz"))
        for line in gzip.decompress(path.read_bytes()).splitlines()
    ]


def test_each_trial_of_a_job_that_has_ended_is_a_line(
    engine: sa.Engine, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(trial_parts, "_TRIALS", 3)
    session_id = make_jobs(engine, 2, solvers=("Noop1", "Noop2"))
    log = TrialParts(engine, str(tmp_path / "logs"), tmp_path / "home")
    end(engine, 1, 2, 3)
    log.add([1, 2])
    log.add([3, 4], last=True)
    assert log.counts == Logged(logged=6, kept=2)
    found = lines(tmp_path / "logs")
    assert {(one["job"], one["number"]) for one in found} == {
        (job, number) for job in (1, 2, 3) for number in (0, 1)
    }
    assert len(list((tmp_path / "logs").iterdir())) == 2
    with reading(engine) as connection:
        uuid = connection.execute(
            sa.select(Session.uuid).where(Session.id == session_id)
        ).scalar_one()
    (one,) = (one for one in found if (one["job"], one["number"]) == (1, 1))
    assert one | {"config": 0, "label": 0} == {
        "session": uuid,
        "job": 1,
        "label": 0,
        "solver": "Noop1",
        "options": {},
        "config": 0,
        "times_ms": [1.5, 0.1],
        "number": 1,
        "params": '{"a": 1}',
        "step": "measure",
        "cause": None,
        "output_tail": 'it said "no"\n',
        "time_ms": 2.5,
        "low_ms": None,
        "high_ms": None,
        "clock": "",
        "ended_early": False,
        "max_error": None,
        "build_s": None,
        "measured_at": None,
    }
    assert one["config"]["kind"] == "gemm"


def test_finals_log_the_trials_again_whose_times_they_changed(
    sqlite_engine: sa.Engine, tmp_path: Path
) -> None:
    make_jobs(sqlite_engine, 1, solvers=("Noop1", "Noop2"))
    with writing(sqlite_engine) as connection:
        row = connection.execute(sa.select(Job).where(Job.id == 1)).one()
        connection.execute(
            sa.update(Job).where(Job.id == 2).values(steps=FINALS, step=FINALS, state="evaluated")
        )
        result = {"session_id": row.session_id, "config_id": row.config_id, "job_id": 1}
        result |= {"solver_id": row.solver_id, "trial_number": 1, "final_job_id": 2, "params": ""}
        connection.execute(sa.insert(FindDb).values(**result, time_ms=1.0, workspace_bytes=0))
    end(sqlite_engine, 1)
    log = TrialParts(sqlite_engine, str(tmp_path / "logs"), tmp_path / "home")
    log.add([1])
    log.add([2], last=True)
    assert [(one["job"], one["number"]) for one in lines(tmp_path / "logs")] == [
        *((1, 0), (1, 1)),
        (1, 1),
    ]


def test_what_cannot_be_sent_waits_for_the_next_run(
    sqlite_engine: sa.Engine, tmp_path: Path
) -> None:
    make_jobs(sqlite_engine, 1)
    (tmp_path / "logs").write_text("a file where the folder would be")
    end(sqlite_engine, 1, 2)
    for job_id, waiting in ((1, 1), (2, 2)):
        log = TrialParts(sqlite_engine, str(tmp_path / "logs"), tmp_path / "home")
        log.add([job_id], last=True)
        assert log.counts.waiting == waiting
        assert "logs" in log.counts.reason
    (tmp_path / "logs").unlink()
    log = TrialParts(sqlite_engine, str(tmp_path / "logs"), tmp_path / "home")
    log.add([], last=True)
    assert log.counts.waiting == 0
    assert {one["job"] for one in lines(tmp_path / "logs")} == {1, 2}


def test_a_full_spool_drops_trials_and_counts_them(
    sqlite_engine: sa.Engine, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(trial_parts, "_SPOOL_BYTES", 100)
    make_jobs(sqlite_engine, 1)
    end(sqlite_engine, 1)
    log = TrialParts(sqlite_engine, "memory://there", tmp_path)
    log.add([1], last=True)
    assert (log.counts.logged, log.counts.waiting, log.counts.dropped) == (0, 0, 2)
    assert "has 0 MiB" in log.counts.reason


def test_a_url_that_does_not_answer_delays_nothing(
    sqlite_engine: sa.Engine, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its part is on its way at the end, and parts are read and kept meanwhile."""
    make_jobs(sqlite_engine, 1)
    asked, answers = threading.Event(), threading.Event()

    def hangs(folder: Folder, name: str, data: bytes) -> None:
        asked.set()
        answers.wait(60)
        raise StoreUnavailable

    monkeypatch.setattr(Folder, "write", hangs)
    monkeypatch.setattr(trial_parts, "_TRIALS", 2)
    monkeypatch.setattr(trial_parts, "_GATHER_S", 0.01)
    monkeypatch.setattr(trial_parts, "_END_S", 0.01)
    end(sqlite_engine, 1, 2)
    log = TrialParts(sqlite_engine, "memory://there", tmp_path)
    log.add([1])
    assert asked.wait(60)
    log.add([2], last=True)
    answers.set()
    assert (log.counts.logged, log.counts.waiting) == (4, 2)


def test_a_bad_url_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ServiceError, match="Protocol not known") as raised:
        ProcessTrialLog("nothing://user:secret@there", tmp_path)
    assert "secret" not in str(raised.value)


@pytest.fixture()
def of_process(sqlite_engine: sa.Engine, monkeypatch: pytest.MonkeyPatch) -> sa.Engine:
    """A database that a process of its own finds, with four jobs of two trials that have ended."""
    monkeypatch.setenv("TUNA_DB_URL", str(sqlite_engine.url))
    get_settings.cache_clear()
    make_jobs(sqlite_engine, 4)
    end(sqlite_engine, 1, 2, 3, 4)
    monkeypatch.setattr(trial_parts, "_GATHER_S", 0.05)
    monkeypatch.setattr(restarts, "_FIRST_PAUSE_S", 0.01)
    return sqlite_engine


def test_a_process_that_is_killed_costs_no_trial(of_process: sa.Engine, tmp_path: Path) -> None:
    """It held jobs in no part yet, of which the next one is told again."""
    with ProcessTrialLog(str(tmp_path / "logs"), tmp_path / "home") as log:
        killed: set[int] = set()
        for job_id in (1, 2, 3):
            log.add([job_id])
            wait_until(lambda: log._told and not log._stored and children() - killed, 60)
            (process,) = children() - killed
            os.kill(process, signal.SIGKILL)
            killed.add(process)
        log.add([4])
    assert (log.counts.logged, log.counts.dropped, log.counts.waiting) == (8, 0, 0)
    assert {(one["job"], one["number"]) for one in lines(tmp_path / "logs")} == {
        (job, number) for job in (1, 2, 3, 4) for number in (0, 1)
    }


def children() -> set[int]:
    """The processes of logs, without those that have ended and not been waited for."""
    found = set()
    for child in psutil.Process().children():
        with contextlib.suppress(psutil.NoSuchProcess):  # ZombieProcess too
            if trial_parts.__name__ in child.cmdline():
                found.add(child.pid)
    return found


def test_a_coordinator_that_is_killed_costs_no_trial_that_was_read(
    of_process: sa.Engine, tmp_path: Path
) -> None:
    script = """
import sys, time
from pathlib import Path
from tuna_trials import trial_parts

trial_parts._GATHER_S = 0.05
with trial_parts.ProcessTrialLog(sys.argv[1], Path(sys.argv[2])) as log:
    log.add([1, 2])
    while len(log._told) < 2:  # the first one was answered
        time.sleep(0.01)
    print(log.counts.logged, flush=True)
    time.sleep(60)
"""
    command = [sys.executable, "-c", script, str(tmp_path / "logs"), str(tmp_path / "home")]
    with subprocess.Popen(command, stdout=subprocess.PIPE, start_new_session=True) as coordinator:
        assert coordinator.stdout
        assert coordinator.stdout.readline() == b"0\n"
        for child in psutil.Process(coordinator.pid).children():
            child.terminate()  # as systemd does with all processes of a unit
        coordinator.kill()
    wait_until(lambda: lines(tmp_path / "logs"), 60)
    assert {one["job"] for one in lines(tmp_path / "logs")} == {1, 2}
