"""Builds borrow measuring cores and give them back at once; a measurement with quiet waits for
builds, and builds for it."""

from __future__ import annotations

import contextlib
import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from tuna.sandbox import core_lending as lending
from tuna.sandbox.core_lending import BuildCores, measuring, offer

CPUS = sorted(os.sched_getaffinity(0))
OWN, LENT = CPUS[0], CPUS[-1]
CORES = BuildCores((OWN,))
LIMIT_S = 60.0
pytestmark = pytest.mark.skipif(len(CPUS) < 2, reason="one core is never lent")
Eventually = Callable[[Callable[[], object], float], None]


def builds() -> int:
    """The number of running builds."""
    return sum(map(lending._is_locked, lending._folder().glob("build-*")))


@pytest.fixture(autouse=True)
def temporary(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setattr("tempfile.gettempdir", lambda: str(tmp_path))
    monkeypatch.setenv("TMPDIR", str(tmp_path))
    monkeypatch.delenv("XDG_RUNTIME_DIR", raising=False)
    return tmp_path


@pytest.fixture
def offered() -> Iterator[None]:
    with contextlib.ExitStack() as stack:
        offer(stack, [LENT])
        yield


@pytest.fixture
def compiler() -> Iterator[int]:
    """The process id of what builds: a shell with a process below it, on the cores that compile."""
    with _compiler() as pid:
        yield pid


@contextlib.contextmanager
def _compiler() -> Iterator[int]:
    words = ["/bin/sh", "-c", "sleep 600 & echo there; wait"]
    process = subprocess.Popen(words, stdout=-1, start_new_session=True)
    assert process.stdout is not None
    assert process.stdout.readline() == b"there\n"
    for pid in _tree(process.pid):
        os.sched_setaffinity(pid, [OWN])
    yield process.pid
    os.killpg(process.pid, signal.SIGKILL)
    process.communicate()


def _tree(pid: int) -> list[int]:
    return [pid, *lending.descendants(pid)]


def _places(pid: int) -> list[set[int]]:
    return [os.sched_getaffinity(one) for one in _tree(pid)]


@contextlib.contextmanager
def _other_process(program: str) -> Iterator[subprocess.Popen[bytes]]:
    """Runs the program until it has printed a line."""
    head = (
        "import contextlib, os, signal, sys\nfrom tuna.sandbox.core_lending import BuildCores,"
        f" measuring, offer\nOWN, LENT = {OWN}, {LENT}\n"
    )
    with subprocess.Popen([sys.executable, "-c", head + program], stdin=-1, stdout=-1) as process:
        assert process.stdout is not None
        process.stdout.readline()
        yield process
        process.kill()


@contextlib.contextmanager
def _thread(
    context: contextlib.AbstractContextManager[object],
) -> Iterator[tuple[threading.Event, threading.Event]]:
    """Enters `context` in a thread; gives an event of its being within, and one that lets it go."""
    within, leave = threading.Event(), threading.Event()

    def run() -> None:
        with context:
            within.set()
            leave.wait(120)

    thread = threading.Thread(target=run)
    thread.start()
    try:
        yield within, leave
    finally:
        leave.set()
        thread.join()


def test_a_build_borrows_a_core_when_builds_use_all_others(offered: None, compiler: int) -> None:
    with CORES.build(LIMIT_S, compiler) as first, CORES.build(LIMIT_S, compiler) as second:
        assert (first, second) == (None, LENT)
        assert os.sched_getaffinity(compiler) == {LENT}
        with CORES.build(LIMIT_S, compiler) as third:
            assert third is None
            assert builds() == 3
    assert _places(compiler) == [{OWN}, {OWN}]
    assert builds() == 0


def test_a_core_is_lent_only_by_a_live_worker_that_measures_with_it(compiler: int) -> None:
    program = (
        "with contextlib.ExitStack() as stack:\n offer(stack, [LENT])\n print(flush=True)\n"
        " sys.stdin.read()"
    )
    with _other_process(program) as worker, CORES.build(LIMIT_S):
        with CORES.build(LIMIT_S, compiler) as core:
            assert core == LENT
        worker.kill()
        worker.wait()
        with CORES.build(LIMIT_S, compiler) as core:
            assert core is None


def test_a_build_without_a_process_to_move_borrows_none(offered: None) -> None:
    with CORES.build(LIMIT_S), CORES.build(LIMIT_S) as core:
        assert core is None


def test_a_measurement_takes_its_core_back_at_once_with_all_that_the_build_started(
    offered: None, compiler: int
) -> None:
    with CORES.build(LIMIT_S), CORES.build(LIMIT_S, compiler):
        lending._pin(_tree(compiler), [LENT])  # as what a build starts is where the build is
        with measuring([LENT]):
            assert _places(compiler) == [{OWN}, {OWN}]
    assert _places(compiler) == [{OWN}, {OWN}]


def test_no_build_borrows_a_core_that_is_measured_with(offered: None, compiler: int) -> None:
    with measuring([LENT]), CORES.build(LIMIT_S), CORES.build(LIMIT_S, compiler) as core:
        assert core is None
        assert _places(compiler) == [{OWN}, {OWN}]
    with CORES.build(LIMIT_S), CORES.build(LIMIT_S, compiler) as core:
        assert core == LENT


def test_a_build_of_several_processes_borrows_beside_its_own_cores(
    offered: None, compiler: int
) -> None:
    with CORES.build(LIMIT_S, compiler, wide=True):
        assert builds() == 2
        assert os.sched_getaffinity(compiler) == {OWN, LENT}
        with CORES.build(LIMIT_S, compiler) as other:
            assert other is None, "it is borrowed already"
        lending._pin(_tree(compiler), [OWN, LENT])  # what a build starts may use the same
        with measuring([LENT]):
            assert _places(compiler) == [{OWN}, {OWN}]
    assert _places(compiler) == [{OWN}, {OWN}]
    with measuring([LENT]), CORES.build(LIMIT_S, compiler, wide=True):
        assert _places(compiler) == [{OWN}, {OWN}]
    assert builds() == 0


def test_two_measurements_may_share_a_core(offered: None) -> None:
    """Of two GPUs whose workers drive them from the same core: the locks of the devices keep apart
    what must be."""
    with measuring([LENT]), measuring([LENT]):
        pass


@pytest.mark.parametrize("ends", [signal.SIGSTOP, signal.SIGKILL], ids=["stopped", "killed"])
def test_a_worker_that_is_stopped_or_killed_in_a_build_holds_up_no_measurement(
    offered: None, compiler: int, ends: signal.Signals
) -> None:
    program = (
        f"with BuildCores((OWN,)).build(60), BuildCores((OWN,)).build(3600, {compiler}):\n"
        f" print(flush=True)\n os.kill(os.getpid(), {int(ends)})"
    )
    with _other_process(program) as worker:
        os.waitid(os.P_PID, worker.pid, os.WSTOPPED | os.WEXITED | os.WNOWAIT)
        assert os.sched_getaffinity(compiler) == {LENT}
        began = time.monotonic()
        with measuring([LENT]):
            assert time.monotonic() - began < 120.0, "the build had an hour"
            assert builds() == (2 if ends == signal.SIGSTOP else 0)
            # else nobody knows of it; the sandbox kills what a dead worker built with
            if ends == signal.SIGSTOP:
                assert os.sched_getaffinity(compiler) == {OWN}


def test_a_build_that_cannot_be_moved_is_waited_for(
    offered: None, compiler: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(lending, "move", lambda *_: False)
    with CORES.build(LIMIT_S), _thread(CORES.build(LIMIT_S, compiler)) as (building, end):
        assert building.wait(120)
        with _thread(measuring([LENT])) as (measured, _):
            assert not measured.wait(0.1)
            end.set()
            assert measured.wait(120)


def test_for_quiet_a_measurement_waits_for_builds_and_no_new_one_begins_meanwhile(
    eventually: Eventually,
) -> None:
    with contextlib.ExitStack() as stack:
        first, end_first = stack.enter_context(_thread(CORES.build(LIMIT_S)))
        assert first.wait(120)
        measured, end_measured = stack.enter_context(_thread(measuring([LENT], quiet=True)))
        eventually(lambda: lending._is_held("quiet"), 120)
        second, _ = stack.enter_context(_thread(CORES.build(LIMIT_S)))
        assert not second.wait(0.1)
        assert not measured.is_set()
        end_first.set()
        assert measured.wait(120)
        assert not second.wait(0.1)
        end_measured.set()
        assert second.wait(120)


def test_a_build_that_waited_goes_before_the_next_measurement(eventually: Eventually) -> None:
    with _thread(measuring([LENT], quiet=True)) as (first, end_first):
        assert first.wait(120)
        with _thread(CORES.build(LIMIT_S)) as (building, end_building):
            eventually(lambda: lending._is_held("waiting"), 120)
            with _thread(measuring([LENT], quiet=True)) as (second, _):
                end_first.set()
                assert building.wait(120)
                assert not second.is_set()
                end_building.set()
                assert second.wait(120)


def test_for_quiet_a_build_is_waited_for_no_longer_than_its_own_limit() -> None:
    with CORES.build(0.2):
        began = time.monotonic()
        with measuring([LENT], quiet=True):
            assert time.monotonic() - began < LIMIT_S
            assert builds() == 1


def test_without_quiet_a_measurement_waits_for_no_build_on_another_core() -> None:
    with CORES.build(LIMIT_S), measuring([LENT]):
        assert builds() == 1


def test_a_frozen_measurement_keeps_builds_waiting_for_a_while_only(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(lending, "QUIET_WAIT_S", 0.05)
    with measuring([LENT], quiet=True), CORES.build(LIMIT_S):
        assert builds() == 1


def test_who_is_canceled_waits_no_longer() -> None:
    with measuring([LENT], quiet=True), CORES.build(LIMIT_S, cancelled=lambda: True):
        with measuring([LENT], quiet=True, cancelled=lambda: True):
            pass


def test_a_file_of_a_build_that_says_nothing_holds_nobody_up_for_long(
    offered: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(lending, "_WRITTEN_S", 0.05)
    with CORES.build(LIMIT_S):
        (path,) = lending._folder().glob("build-*")
        path.write_text('{"until"')
        with measuring([LENT], quiet=True):
            pass
