"""Limits by CPU time, forks of a child, and how busy the machine is."""

from __future__ import annotations

import os
import time
from collections.abc import Iterator
from pathlib import Path

import pytest
from test_processes import MODULE, environment

from tuna.common.cpu import Load, load
from tuna.sandbox import process_tree
from tuna.sandbox.process_tree import CpuLimit
from tuna.sandbox.processes import Child, ChildCrashed, ChildFailed, ChildTimeout


@pytest.fixture
def child() -> Iterator[Child]:
    made = Child(MODULE, env=environment())
    yield made
    made.close()


def test_a_limit_by_cpu_time_counts_that_of_helpers_that_have_ended(child: Child) -> None:
    child.call({"op": "echo", "value": 1}, 60)
    with pytest.raises(ChildTimeout, match=r"no answer within 1 s of CPU time"):
        child.call({"op": "burn", "seconds": 0.4, "helpers": 9}, 1, cpu_limit=True)


def test_cpu_time_of_earlier_calls_does_not_count(child: Child) -> None:
    child.call({"op": "burn", "seconds": 1.2}, 60)
    assert child.call({"op": "burn", "seconds": 0.1}, 1, cpu_limit=True) == {"done": True}


def test_a_child_that_uses_no_cpu_for_as_long_hangs(child: Child) -> None:
    child.call({"op": "echo", "value": 1}, 60)
    with pytest.raises(ChildTimeout, match="without using the CPU"):
        child.call({"op": "wait", "seconds": 600}, 1, cpu_limit=True)


def test_a_call_ends_after_its_cpu_seconds_and_the_next_has_as_many(child: Child) -> None:
    for _ in range(2):
        child.call({"op": "burn", "seconds": 0.6, "cpu_s": 1}, 60)
    with pytest.raises(ChildCrashed, match="the child ended with SIGXCPU"):
        child.call({"op": "burn", "seconds": 600, "cpu_s": 1}, 60)


def test_on_a_busy_machine_a_slow_build_is_given_time(monkeypatch: pytest.MonkeyPatch) -> None:
    """A tenth of a core: 10 s of CPU time take 100 s, and 20 times the limit is the end."""
    clock = [0.0]
    monkeypatch.setattr(process_tree, "session_cpu_s", lambda session: clock[0] / 10)
    limit = CpuLimit(1, 10, 0.0)
    said = {}
    for clock[0] in (5.0, 50.0, 99.0, 101.0):
        said[clock[0]] = limit.exceeded(clock[0])
    assert said == {5.0: "", 50.0: "", 99.0: "", 101.0: "10 s of CPU time"}
    clock[0] = 0.0
    monkeypatch.setattr(process_tree, "session_cpu_s", lambda session: clock[0] / 40)
    slower = CpuLimit(1, 10, 0.0)
    assert [slower.exceeded(at) for clock[0] in (50.0, 199.0, 201.0) for at in clock] == [
        "",
        "",
        "200 s",
    ]


def test_a_request_can_be_answered_by_a_fork(child: Child) -> None:
    here = child.call({"op": "echo", "value": 1}, 60)
    first, second = (
        child.call({"op": "echo", "value": 2, "fork": number}, 60) for number in (1, 2)
    )
    assert len({here["pid"], first["pid"], second["pid"]}) == 3
    assert (first["value"], child.starts) == (2, 1)
    with pytest.raises(ChildFailed, match="no such luck"):
        child.call({"op": "fail", "fork": 1}, 60)
    assert child.call({"op": "echo", "value": 3}, 60)["pid"] == here["pid"]


def test_a_fork_that_crashes_or_leaves_is_a_crash_of_the_child(child: Child) -> None:
    with pytest.raises(ChildCrashed, match="SIGSEGV") as error:
        child.call({"op": "crash", "fork": 1}, 60)
    assert "last words" in error.value.tail
    with pytest.raises(ChildCrashed, match="exit code 7"):
        child.call({"op": "leave", "code": 7, "fork": 1}, 60)
    with pytest.raises(ChildTimeout):
        child.call({"op": "hang", "fork": 1}, 1)


def stat(path: Path, busy: int, idle: int) -> Path:
    path.write_text(f"cpu  {busy} 0 0 {idle} 0 0 0 0 0 0\ncpu0 1 1 1 1\n")
    return path


@pytest.mark.parametrize(("busy", "word"), [(5, ""), (50, "This machine is busy: ")])
def test_the_load_and_what_to_do_about_it(tmp_path: Path, busy: int, word: str) -> None:
    file = stat(tmp_path / "stat", 1000, 1000)
    found = load(0.2, file, lambda seconds: stat(file, 1000 + busy, 1100 - busy) and None)
    assert found == Load(busy / 100, os.cpu_count() or 1)
    assert found.advice.startswith(word)
    assert bool(found.advice) == bool(word)


def test_without_proc_the_load_is_that_of_the_last_minute(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(os, "getloadavg", lambda: (100.0, 0.0, 0.0))
    started = time.monotonic()
    assert load(60, tmp_path / "stat").share == 1.0
    assert time.monotonic() - started < 30
