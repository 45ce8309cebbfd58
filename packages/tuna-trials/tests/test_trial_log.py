"""Logs of all trials, in parts and in a file for each job: what the URL does not take waits, and
whatever is killed, the next process goes on at the cursor."""

from __future__ import annotations

import contextlib
import errno
import gzip
import json
import os
import signal
import subprocess
import sys
from pathlib import Path
from typing import Any

import fsspec
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
from tuna_trials import log_files, trial_log
from tuna_trials.trial_log import JournalTrialLog, Sender


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
        for path in sorted(folder.glob("*.jsonl.gz"))
        for line in gzip.decompress(path.read_bytes()).splitlines()
    ]


def trials(folder: Path) -> list[tuple[int, int]]:
    return sorted((one["job"], one["number"]) for one in lines(folder))


class Written:
    """A journal whose coordinator has ended, and what goes through it."""

    def __init__(self, engine: sa.Engine, folder: Path, url: str = "", by_job: bool = False):
        self._engine, self.url, self._by_job = engine, url or str(folder / "logs"), by_job
        self.spool = folder / "journals"
        self.spool.mkdir()
        self.number = 1

    def add(self, *job_ids: int) -> None:
        with open(self.path, "ab") as journal:
            for one in job_ids:
                journal.write(one.to_bytes(8, sys.byteorder))

    @property
    def path(self) -> Path:
        return self.spool / f"trials-{self.number}.jobs"

    def sender(self) -> Sender:
        return Sender(self._engine, self.url, self.spool, self._by_job)

    def send(self) -> Logged:
        sender = self.sender()
        sender.look(last=True)
        self.number += 1
        return sender.counts


def test_each_trial_of_a_job_that_has_ended_is_a_line(
    engine: sa.Engine, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(trial_log, "PARTS", log_files.PARTS._replace(full=3))
    monkeypatch.setattr(trial_log, "_JOBS", 1)
    session_id = make_jobs(engine, 2, solvers=("Noop1", "Noop2"))
    written = Written(engine, tmp_path)
    end(engine, 1, 2, 3)
    written.add(1, 2, 3, 4, 2, 1)  # each step of a job is told
    assert written.send() == Logged(logged=6)
    assert list(written.spool.iterdir()) == []
    logged = lines(tmp_path / "logs")
    assert trials(tmp_path / "logs") == [(job, n) for job in (1, 2, 3) for n in (0, 1)]
    assert len(list((tmp_path / "logs").iterdir())) == 2
    with reading(engine) as connection:
        uuid = connection.execute(
            sa.select(Session.uuid).where(Session.id == session_id)
        ).scalar_one()
    (one,) = (one for one in logged if (one["job"], one["number"]) == (1, 1))
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


@pytest.mark.parametrize("by_job", [False, True], ids=["parts", "files by job"])
def test_finals_log_the_trials_again_whose_times_they_changed(
    sqlite_engine: sa.Engine, tmp_path: Path, by_job: bool
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
    written = Written(sqlite_engine, tmp_path, by_job=by_job)
    for job_id in (1, 2):
        written.add(job_id)
        written.send()
        with writing(sqlite_engine) as connection:
            connection.execute(sa.update(TrialRow).values(time_ms=9.0))
    logged = lines(tmp_path / "logs")
    if by_job:
        assert [(one["number"], one["time_ms"]) for one in logged] == [(0, 9.0), (1, 9.0)]
    else:
        assert [(one["job"], one["number"]) for one in logged] == [(1, 0), (1, 1), (1, 1)]


def test_jobs_of_one_layer_and_solver_have_one_file(
    sqlite_engine: sa.Engine, tmp_path: Path
) -> None:
    """Such as a random search, and later one that learns; at any URL of fsspec."""
    make_jobs(sqlite_engine, 1, solvers=("Noop1", "Noop2"))
    make_jobs(sqlite_engine, 1, solvers=("Noop1",), steps="measure")
    written = Written(sqlite_engine, tmp_path, "memory://bucket/logs", by_job=True)
    end(sqlite_engine, 1, 3)
    written.add(1, 2, 3)
    assert written.send() == Logged(logged=4)
    files = fsspec.filesystem("memory")
    (path,) = files.ls("/bucket/logs", detail=False)
    name = path.rpartition("/")[2]
    assert (len(name), name[64:]) == (64 + len("-Noop1.jsonl.gz"), "-Noop1.jsonl.gz")
    found = [json.loads(one) for one in gzip.decompress(files.cat_file(path)).splitlines()]
    assert [(one["number"], one["times_ms"]) for one in found] == [
        (number, [1.5, 0.1]) for number in (0, 1, 0, 1)
    ]
    assert (found[0]["solver"], found[0]["config"]["kind"]) == ("Noop1", "gemm")


def test_a_cursor_goes_on_after_a_restart(
    sqlite_engine: sa.Engine, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The URL has failed after a part; that part is not sent again."""
    make_jobs(sqlite_engine, 1)
    end(sqlite_engine, 1, 2, 3)
    monkeypatch.setattr(trial_log, "PARTS", log_files.PARTS._replace(full=2))
    monkeypatch.setattr(trial_log, "_JOBS", 1)
    written, sent = Written(sqlite_engine, tmp_path), []
    written.add(1, 2, 3)
    write = Folder.write

    def fails(folder: Folder, name: str, data: bytes) -> None:
        if sent:
            raise StoreUnavailable("it is away")
        sent.append(name)
        write(folder, name, data)

    with monkeypatch.context() as patch:
        patch.setattr(Folder, "write", fails)
        assert written.send() == Logged(logged=2, waiting=2, reason="it is away")
    assert written.send() == Logged(logged=4)
    assert trials(tmp_path / "logs") == [(job, n) for job in (1, 2, 3) for n in (0, 1)]
    assert len(list((tmp_path / "logs").iterdir())) == 3


def test_a_journal_that_a_full_disk_does_not_take_is_written_later(
    sqlite_engine: sa.Engine, tmp_path: Path
) -> None:
    class Disk:
        """Takes half of a number, then nothing, then all."""

        def __init__(self) -> None:
            self.data, self._free = b"", [4, 0]

        def write(self, data: bytes) -> int:
            free = self._free.pop(0) if self._free else len(data)
            if not free:
                raise OSError(errno.ENOSPC, "No space left on device")
            self.data += data[:free]
            return free

    log = JournalTrialLog("memory://there", tmp_path)
    log._journal = disk = Disk()  # type: ignore[assignment]
    log.add([1])
    log.add([2])
    assert "No space left" in log.counts.reason
    log.add([3])
    written = Written(sqlite_engine, tmp_path)
    written.add(1, 2, 3)
    assert disk.data == written.path.read_bytes()


def test_a_bad_url_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ServiceError, match="Protocol not known") as raised:
        JournalTrialLog("nothing://user:secret@there", tmp_path)
    assert "secret" not in str(raised.value)


@pytest.fixture()
def of_process(sqlite_engine: sa.Engine, monkeypatch: pytest.MonkeyPatch) -> sa.Engine:
    """A database that a process of its own finds, with four jobs of two trials that have ended."""
    monkeypatch.setenv("TUNA_DB_URL", str(sqlite_engine.url))
    get_settings.cache_clear()
    make_jobs(sqlite_engine, 4)
    end(sqlite_engine, 1, 2, 3, 4)
    monkeypatch.setattr(restarts, "_FIRST_PAUSE_S", 0.01)
    return sqlite_engine


def children() -> set[int]:
    """The processes of logs, without those that have ended and not been waited for."""
    found = set()
    for child in psutil.Process().children():
        with contextlib.suppress(psutil.NoSuchProcess):  # it ends meanwhile
            if trial_log.__name__ in child.cmdline():
                found.add(child.pid)
    return found


def test_a_process_that_is_killed_costs_no_trial(of_process: sa.Engine, tmp_path: Path) -> None:
    """It held jobs that were in no part yet."""
    with JournalTrialLog(str(tmp_path / "logs"), tmp_path / "home") as log:
        for job_id in (1, 2):
            log.add([job_id])
            wait_until(lambda number=job_id: log.counts.waiting == number and children(), 60)
            (process,) = children()
            log.counts.waiting = 0
            os.kill(process, signal.SIGKILL)
            wait_until(lambda killed=process: killed not in children(), 60)
        log.add([3, 4])
    assert log.counts == Logged(logged=8)
    assert trials(tmp_path / "logs") == [(job, n) for job in (1, 2, 3, 4) for n in (0, 1)]
    assert list(log.spool.iterdir()) == []


def test_a_coordinator_that_is_killed_costs_no_trial(of_process: sa.Engine, tmp_path: Path) -> None:
    script = """
import sys, time
from pathlib import Path
from tuna_trials import trial_log

with trial_log.JournalTrialLog(sys.argv[1], Path(sys.argv[2])) as log:
    log.add([1, 2])
    while not log.counts.waiting:
        time.sleep(0.01)
    log.add([3])
    print("added", flush=True)
    time.sleep(60)
"""
    command = [sys.executable, "-c", script, str(tmp_path / "logs"), str(tmp_path / "home")]
    with subprocess.Popen(command, stdout=subprocess.PIPE, start_new_session=True) as coordinator:
        assert coordinator.stdout
        assert coordinator.stdout.readline() == b"added\n"
        for child in psutil.Process(coordinator.pid).children():
            child.terminate()  # as systemd does with all processes of a unit
        coordinator.kill()
    wait_until(lambda: len(trials(tmp_path / "logs")) == 6, 60)


def test_a_url_that_does_not_answer_ends_with_its_process(
    of_process: sa.Engine, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The next run with this URL sends what it did not take."""
    hangs = "from tuna.artifacts.files import Folder; import time, tuna_trials.trial_log as t;"
    hangs += "t._END_S = 1; Folder.write = lambda *_: time.sleep(3600); "
    command = trial_log.module_command

    def hanging(module: str) -> list[str]:
        words = command(module)
        words[words.index("-c") + 1] = f"import sys; {hangs}t.main()"
        return words

    with monkeypatch.context() as patch:
        patch.setattr(trial_log, "module_command", hanging)
        with JournalTrialLog(str(tmp_path / "logs"), tmp_path / "home") as log:
            log.add([1, 2])
    assert (log.counts.logged, log.counts.waiting) == (0, 2)
    with JournalTrialLog(str(tmp_path / "logs"), tmp_path / "home") as log:
        pass
    assert (log.counts.logged, log.counts.waiting) == (4, 0)
