"""kill -9 of a command in its first seconds leaves nothing behind; one of the private Redis alone
stops nothing."""

from __future__ import annotations

import contextlib
import os
import random
import time
from collections.abc import Callable, Iterable
from pathlib import Path

import psutil
import pytest
import redis
import sqlalchemy as sa
from jobs_builder import accepted, make_jobs, states, trials
from processes import Processes
from shared_data import DRILLS

from tuna.services.embedded_redis import EmbeddedRedis
from tuna.settings import get_settings

Eventually = Callable[[Callable[[], object], float], None]
Capture = pytest.CaptureFixture[str]

LAYERS = """\
./bin/MIOpenDriver conv -n 1 -c 16 -H 10 -W 10 -k 16 -y 3 -x 3 -p 1 -q 1 -u 2 -v 2 -F 1
./bin/MIOpenDriver gemm -m 32 -n 48 -k 16
"""
_KILLS = 1 if DRILLS == 1 else 10
#: Seconds; the rest is for a busy machine.
_GOES_ON_S, _GONE_S = 10 + 20, 2 + 8


def of_home(home: Path) -> list[psutil.Process]:
    """The processes of Tuna that use a home, and all that they started."""
    found = []
    for process in psutil.process_iter():
        with contextlib.suppress(psutil.Error):
            named = process.environ().get("TUNA_HOME") == str(home) or Path(
                process.cwd()
            ).is_relative_to(home)
            if named and process.status() != psutil.STATUS_ZOMBIE and process.pid != os.getpid():
                found.append(process)
    return found


def living(processes: Iterable[psutil.Process]) -> list[str]:
    """The last words of the command lines of those that have not ended."""
    found = []
    for process in processes:
        with contextlib.suppress(psutil.Error):
            if process.is_running() and process.status() != psutil.STATUS_ZOMBIE:
                found.append(" ".join(process.cmdline())[-80:])
    return found


def has_worker(run: psutil.Process) -> bool:
    """True if a command has started a worker."""
    with contextlib.suppress(psutil.Error):
        return any("celery" in word for one in run.children() for word in one.cmdline())
    return False


def test_a_run_that_is_killed_as_it_starts_its_workers_leaves_no_process(
    engine: sa.Engine, processes: Processes, tuna_home: Path, eventually: Eventually
) -> None:
    make_jobs(engine, 12, options={"trials": 1, "sleep_s": 0.02})
    run = processes.start("tuna", "run", "--session-id", "1", forked=False)
    eventually(lambda: has_worker(run), 60)
    processes.kill(run)
    eventually(lambda: not of_home(tuna_home), _GONE_S)


@pytest.mark.drill(only=True)
@pytest.mark.timeout(1200)
@pytest.mark.parametrize("command", ["run", "tune"])
def test_commands_that_are_killed_in_their_first_seconds_leave_no_process(
    engine: sa.Engine,
    processes: Processes,
    tuna_home: Path,
    tmp_path: Path,
    eventually: Eventually,
    command: str,
    capsys: Capture,
) -> None:
    (tmp_path / "layers.txt").write_text(LAYERS)
    if command == "run":
        make_jobs(engine, 500, options={"trials": 1, "sleep_s": 0.02})
    words = {
        "run": ("run", "--session-id", "1"),
        "tune": ("tune", str(tmp_path / "layers.txt"), "-t", "t"),
    }[command]
    left, seen, took_s = [], [], []
    for number in range(30):
        killed = processes.start("tuna", *words, forked=False)
        # A busy machine may not reach these in three seconds.
        if number % 3 == 1:
            eventually(killed.children, 60)
        if number % 3 == 2:
            eventually(lambda killed=killed: has_worker(killed), 60)
        time.sleep(random.uniform(0, 3))
        tree = {*of_home(tuna_home), *killed.children(recursive=True)}
        seen.append(len(tree))
        processes.kill(killed)
        began_at = time.monotonic()
        alive = living(tree | set(of_home(tuna_home)))
        while alive and time.monotonic() - began_at < 2:
            time.sleep(0.02)
            alive = living(tree | set(of_home(tuna_home)))
        took_s.append(round(time.monotonic() - began_at, 2))
        left.append(alive)
    with capsys.disabled():
        print(
            f"\n{command}: processes at the kill {seen}, seconds until none was left {took_s},"
            f" after 2 s {left}"
        )
    assert not any(left)


@pytest.mark.timeout(600)
def test_a_run_goes_on_where_its_redis_was_killed(
    engine: sa.Engine, processes: Processes, eventually: Eventually, capsys: Capture
) -> None:
    jobs = 30 if DRILLS == 1 else 4000
    make_jobs(engine, jobs // 10, options={"trials": 1, "sleep_s": 0.05})
    server = EmbeddedRedis(get_settings().run_dir)
    run = processes.start("tuna", "run", "--session-id", "1")
    took_s = []
    for _ in range(_KILLS):
        before = len(accepted(engine))
        eventually(lambda before=before: len(accepted(engine)) > before, 60)
        first = _pid(server)
        assert first is not None
        psutil.Process(first).kill()
        began_at = time.monotonic()
        eventually(lambda first=first: _pid(server) not in (None, first), _GOES_ON_S)
        before = min(len(accepted(engine)), 2 * jobs - 1)  # by now, all may be done
        eventually(lambda before=before: len(accepted(engine)) > before, _GOES_ON_S)
        took_s.append(round(time.monotonic() - began_at, 2))
    assert run.wait(400) == 0
    assert states(engine) == {"evaluated": jobs}
    assert len(accepted(engine)) == 2 * jobs
    assert {count for *_, count in accepted(engine)} == {1}
    assert trials(engine) == jobs
    with capsys.disabled():
        print(f"\nseconds until a result was stored again: {took_s}")


def _pid(server: EmbeddedRedis) -> int | None:
    """The process id of the server; None if it does not answer."""
    with contextlib.suppress(redis.ConnectionError), contextlib.closing(server.client()) as client:
        return int(client.info("server")["process_id"])
    return None
