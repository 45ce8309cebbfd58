"""`tuna status --watch`: the numbers, the terminal, the lines, and how it ends."""

from __future__ import annotations

import json
import os
import pty
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from datetime import datetime, timedelta, timezone
from pathlib import Path
from typing import Any

import pytest
import redis
import sqlalchemy as sa
from builders import DatabaseBuilder
from jobs_builder import make_jobs
from queries import read_value

from tuna.cli import status as view
from tuna.db import models
from tuna.db.engine import make_engine, reading, writing
from tuna.db.types import utc_now
from tuna.queue.heartbeat import HeartbeatBoard, WorkerStatus
from tuna.reports import status
from tuna.reports.status import Watcher
from tuna.reports.totals import Sum, Totals, most_at_once
from tuna.settings import Settings

START = datetime(2026, 3, 2, 9, 30, tzinfo=timezone.utc)


def _settings(tmp_path: Path) -> Settings:
    return Settings(home=tmp_path / "home")


def _worker(name: str, role: str, **fields: Any) -> WorkerStatus:
    known: dict[str, Any] = {
        "name": name,
        "role": role,
        "host": "h",
        "pid": 1,
        "device": "",
        "environment": "",
        "toolchains": ("noop-1",),
        "job_ids": (),
        "started_at": 0.0,
        "seen_at": 0.0,
    }
    return WorkerStatus(**(known | fields))


def _history(engine: sa.Engine) -> int:
    """40 jobs of which 10 are built (4 s each by two processes) and 5 measured (2 s each by one
    device)."""
    session_id = make_jobs(engine, 4)
    with writing(engine) as connection:
        ids = list(connection.execute(sa.select(models.Job.id).order_by(models.Job.id)).scalars())
        build = DatabaseBuilder(connection, clock=START)
        for number, job in enumerate(ids[:10]):
            build.clock = START + timedelta(seconds=4 * (number // 2))
            build.step(job, "build", 4, 4.0, worker=f"w:{number % 2}")
        for number, job in enumerate(ids[:5]):
            build.clock = START + timedelta(seconds=10 + 2 * number)
            build.step(job, "measure", 2, 1.5, device="gpu0", worker="e:1")
        move = sa.update(models.Job)
        connection.execute(
            move.where(models.Job.id.in_(ids[:5])).values(state="evaluated", step="measure")
        )
        connection.execute(
            move.where(models.Job.id.in_(ids[5:10])).values(state="compiled", step="measure")
        )
    return session_id


@pytest.mark.both_databases_in_drills
def test_eta_and_efficiency_come_from_what_steps_took(
    engine: sa.Engine, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    _history(engine)
    monkeypatch.setattr(
        status,
        "live_workers",
        lambda *_: (_worker("a", "compile"), _worker("b", "compile"), _worker("c", "eval")),
    )
    (session,) = Watcher(engine, _settings(tmp_path)).look().sessions
    assert session.unfinished == 35
    # 30 builds of 4 s by two processes; 35 measurements of 2 s by one device.
    assert session.eta_s == 70.0
    totals = session.totals
    assert totals is not None
    assert (totals.attempts, totals.devices, totals.processes) == (15, 1, 2)
    assert totals.wall_s == 20.0
    assert totals.lower_bound_s == 20.0, "40 s of building by two processes; 7.5 s of measuring"
    assert totals.efficiency == 1.0
    assert totals.idle_share == pytest.approx(0.25)


@pytest.mark.both_databases_in_drills
def test_nobody_at_work_means_no_eta(
    engine: sa.Engine, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    _history(engine)
    monkeypatch.setattr(status, "live_workers", lambda *_: (_worker("a", "compile"),))
    assert Watcher(engine, _settings(tmp_path)).look().sessions[0].eta_s is None
    monkeypatch.setattr(
        status,
        "live_workers",
        lambda *_: (_worker("a", "compile"), _worker("c", "eval", environment="x")),
    )
    assert Watcher(engine, _settings(tmp_path)).look().sessions[0].eta_s is None, (
        "it measures for another environment"
    )


@pytest.mark.both_databases_in_drills
def test_the_rate_is_that_of_the_last_minute(engine: sa.Engine, tmp_path: Path) -> None:
    session_id = _history(engine)
    watcher = Watcher(engine, _settings(tmp_path))
    assert watcher.look().sessions[0].rate_per_s == 0.0
    with writing(engine) as connection:
        job = connection.execute(sa.select(sa.func.max(models.Job.id))).scalar_one()
        build = DatabaseBuilder(connection)
        for attempt in range(21):
            build.clock = utc_now() - timedelta(seconds=10)
            build.step(job, "build", 0.0, 0.0, attempt=attempt + 1)
    # 21 results in the 10 s since the first, and a busy machine adds some
    assert 21 / 60 < watcher.look().sessions[0].rate_per_s <= 2.1
    assert watcher.look().sessions[0].overview.session_id == session_id


@pytest.mark.both_databases_in_drills
def test_totals_are_the_same_however_they_are_read(
    engine: sa.Engine, monkeypatch: pytest.MonkeyPatch
) -> None:
    from tuna.reports import totals

    _history(engine)
    with reading(engine) as connection:
        whole = Totals(trials=True)
        assert whole.advance(connection, 10)
        monkeypatch.setattr(totals, "_CHUNK", 2)
        monkeypatch.setattr(totals, "_UNSETTLED", 3)
        parts, looks = Totals(trials=True), 1
        while not parts.advance(connection, 0.0):
            looks += 1
            assert parts.share < 1
        assert looks > 3
        assert parts.sessions() == whole.sessions()
        assert parts.advance(connection, 0.0)
        assert parts.sessions() == whole.sessions(), "nothing is counted twice"


def test_a_process_that_was_replaced_counts_once() -> None:
    def span(start: int, end: int) -> Sum:
        return Sum(1, 1.0, START + timedelta(seconds=start), START + timedelta(seconds=end))

    assert most_at_once([span(0, 5), span(5, 9), span(2, 7)]) == 2
    assert most_at_once([]) == 0


@pytest.mark.both_databases_in_drills
def test_workers_are_shown_and_their_lack_is_a_dash(
    engine: sa.Engine, tmp_path: Path, redis_client: redis.Redis, redis_urls: dict[str, str]
) -> None:
    make_jobs(engine, 1)
    url = redis_urls["TUNA_REDIS_URL"]
    namespace = read_value(engine, sa.select(models.Installation.namespace))
    HeartbeatBoard(redis_client, namespace, 20).announce(
        _worker("h:1", "eval", device="gpu0", job_ids=(7, 8))
    )
    there = Watcher(engine, Settings(home=tmp_path, redis_url=url, broker_url=url)).look()
    assert [worker.device for worker in there.workers or ()] == ["gpu0"]
    assert "gpu0" in _text(view.view(there))
    gone = "redis://127.0.0.1:1"
    away = Watcher(engine, Settings(home=tmp_path, redis_url=gone, broker_url=gone)).look()
    assert away.workers is None
    assert "Redis does not answer" in _text(view.view(away))
    assert "workers –" in view.lines(away)[0]


@pytest.mark.both_databases_in_drills
def test_an_idle_home_has_no_workers_and_no_fault(engine: sa.Engine, tmp_path: Path) -> None:
    """It said that Redis does not answer, where none runs since nothing is to be done."""
    _history(engine)
    idle = Watcher(engine, Settings(home=tmp_path, _env_file=None)).look()
    assert idle.workers == ()
    assert "workers: none" in _text(view.view(idle))


def _text(renderable: Any) -> str:
    from rich.console import Console

    console = Console(width=200)
    with console.capture() as captured:
        console.print(renderable)
    return captured.get()


def test_failures_come_with_their_command(engine: sa.Engine, tmp_path: Path) -> None:
    session_id = _history(engine)
    with writing(engine) as connection:
        job = connection.execute(sa.select(sa.func.max(models.Job.id))).scalar_one()
        build = DatabaseBuilder(connection, clock=START)
        build.step(job, "build", 1, 1, ok=False, cause="build_error", output_tail="a\nno [bold]")
        connection.execute(
            sa.update(models.Job).where(models.Job.id == job).values(state="errored")
        )
    snapshot = Watcher(engine, _settings(tmp_path)).look()
    text = _text(view.view(snapshot))
    assert f"session {session_id}: 1 build_error: no [bold]" in text
    (failure,) = snapshot.sessions[0].overview.failures
    assert failure.reproduce.startswith("tuna reproduce --library noop --step build --solver Noop")
    assert failure.reproduce in text


def _start(home: Path, *words: str, **options: Any) -> subprocess.Popen[str]:
    env = os.environ | {"TUNA_HOME": str(home), "TERM": "xterm", "COLUMNS": "160", "LINES": "50"}
    command = [sys.executable, "-m", "tuna", "status", "--watch", "--interval", "0.2", *words]
    return subprocess.Popen(command, env=env, text=True, stderr=subprocess.PIPE, **options)


@pytest.fixture
def home(tuna_home: Path) -> Path:
    engine = make_engine(f"sqlite:///{tuna_home}/tuna.sqlite")
    _history(engine)
    return tuna_home


@pytest.mark.usefixtures("forked")
def test_not_on_a_terminal_a_line_an_interval_until_ctrl_c(home: Path) -> None:
    process = _start(home, stdout=subprocess.PIPE)
    assert process.stdout is not None
    found = [process.stdout.readline() for _ in range(3)]
    process.send_signal(signal.SIGINT)
    _, errors = process.communicate(timeout=120)
    assert (process.returncode, errors) == (0, "")
    for line in found:
        assert "session 1: 5 compiled, 5 evaluated, 30 new; 0.00 results/s, ETA " in line
        assert "efficiency 100 %, idle 25 %, workers 0" in line


@pytest.mark.usefixtures("forked")
def test_json_is_an_object_a_line(home: Path) -> None:
    process = _start(home, "--json", stdout=subprocess.PIPE)
    assert process.stdout is not None
    document = json.loads(process.stdout.readline())
    process.send_signal(signal.SIGINT)
    assert process.communicate(timeout=120)[1] == ""
    assert document["sessions"][0]["overview"]["jobs"] == {"compiled": 5, "evaluated": 5, "new": 30}
    assert document["sessions"][0]["totals"]["efficiency"] == 1.0


def test_on_a_terminal_a_view_until_ctrl_c(home: Path, eventually: Callable[..., None]) -> None:
    leader, follower = pty.openpty()
    process = _start(home, stdout=follower, stdin=follower)
    os.close(follower)
    os.set_blocking(leader, False)
    seen = b""

    def shown() -> bool:
        nonlocal seen
        try:
            seen += os.read(leader, 65536)
        except BlockingIOError:
            time.sleep(0.05)
        return seen.count(b"Ctrl-C to leave") > 2

    eventually(shown, 60.0)
    process.send_signal(signal.SIGINT)
    _, errors = process.communicate(timeout=120)
    os.close(leader)
    assert (process.returncode, errors) == (0, "")
    assert b"\x1b[?25l" in seen, "it is a live view"
    assert b"5 compiled, 5 evaluated, 30 new" in seen


@pytest.mark.usefixtures("forked")
def test_a_session_that_is_not_there_is_one_sentence(home: Path) -> None:
    process = _start(home, "--session-id", "9", stdout=subprocess.PIPE)
    _, errors = process.communicate(timeout=120)
    assert process.returncode == 3
    assert "Unknown session 9." in errors
