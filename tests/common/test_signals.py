"""Signals that come while the handler of the last one runs."""

from __future__ import annotations

import contextlib
import fcntl
import os
import pty
import signal
import subprocess
import sys
import termios
from collections.abc import Iterator
from pathlib import Path

import psutil
import pytest
from private_servers import wait_until

from tuna.common import signals

#: A handler interrupts the main thread, and itself, in the middle of `set`, thousands of times.
_BURST = """
import signal
from tuna.common.signals import SignalEvent

event, calls = SignalEvent(), 0

def ask(*_):
    global calls
    calls += 1
    event.set()

signal.signal(signal.SIGALRM, ask)
signal.setitimer(signal.ITIMER_REAL, 5e-4, 5e-4)
while calls < 2000:
    event.set()
    event.wait(0)
signal.setitimer(signal.ITIMER_REAL, 0)
"""


def test_a_handler_may_set_an_event_whatever_it_interrupts() -> None:
    subprocess.run([sys.executable, "-c", _BURST], timeout=60, check=True)


@pytest.fixture()
def asked(monkeypatch: pytest.MonkeyPatch) -> Iterator[list[tuple[int, bool]]]:
    """What signals ask of this process, whose own handlers come back after the test."""
    monkeypatch.setattr(signals, "ECHO_S", 0.0)
    found: list[tuple[int, bool]] = []
    with signals.handling(lambda number, at_once: found.append((number, at_once))):
        yield found


@pytest.mark.parametrize("number", signals.ENDING)
def test_the_second_signal_is_at_once_whichever_it_is(
    asked: list[tuple[int, bool]], number: int
) -> None:
    signal.raise_signal(number)
    signal.raise_signal(signal.SIGTERM)
    assert asked == [(number, False), (signal.SIGTERM, True)]


def test_the_echo_of_a_signal_is_no_second_one(
    asked: list[tuple[int, bool]], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(signals, "ECHO_S", 3600.0)
    signal.raise_signal(signal.SIGTERM)
    signal.raise_signal(signal.SIGINT)
    assert asked == [(signal.SIGTERM, False)]
    signal.raise_signal(signal.SIGQUIT)
    assert asked[1:] == [(signal.SIGQUIT, True)]


def test_who_was_started_by_a_command_takes_repeats_for_one_and_ignores_nothing(
    asked: list[tuple[int, bool]],
) -> None:
    with signals.handling(lambda *_: None):
        signal.signal(signal.SIGHUP, signal.SIG_IGN)
        signal.signal(signal.SIGTERM, signal.SIG_IGN)
        with signals.handling(lambda *found: asked.append(found)):
            signal.raise_signal(signal.SIGHUP)
            assert asked == [], "nohup ignores it"
        with signals.handling(lambda *found: asked.append(found), by_command=True):
            for _ in range(3):
                signal.raise_signal(signal.SIGTERM)
            signal.raise_signal(signals.NOW)
    assert asked == [(signal.SIGTERM, False), (signals.NOW, True)]


def test_what_comes_while_signals_are_held_is_asked_afterwards(
    asked: list[tuple[int, bool]],
) -> None:
    with contextlib.suppress(ZeroDivisionError), signals.held(), signals.held():
        signal.raise_signal(signal.SIGTERM)
        assert asked == []
        _ = 1 / 0
    assert asked == [(signal.SIGTERM, False)]
    with signals.held():
        signal.raise_signal(signal.SIGTERM)
        assert asked[1:] == [(signal.SIGTERM, True)], "at once"


#: A program that waits for a signal, and says so on its way out
_WAITS = """
import os, time
from tuna.common import signals

def program():
    try:
        print(os.getpid(), flush=True)
        while True:
            time.sleep(60)
    finally:
        print("returned", flush=True)

signals.run_program(program)
"""


@pytest.mark.parametrize("number", [*signals.ENDING, signal.SIGQUIT])
def test_a_program_returns_what_it_has_and_ends_as_by_the_signal(number: signal.Signals) -> None:
    process = subprocess.Popen([sys.executable, "-c", _WAITS], stdout=subprocess.PIPE, text=True)
    assert process.stdout is not None
    process.stdout.readline()
    process.send_signal(number)
    assert process.communicate(timeout=60)[0] == "returned\n"
    assert process.returncode == 128 + number


def test_nobody_who_reads_is_no_traceback() -> None:
    process = subprocess.Popen(
        [sys.executable, "-c", _WAITS.replace("returned", "x" * 100).replace(", flush=True)", ")")],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        env={**os.environ, "PYTHONUNBUFFERED": ""},
    )
    assert process.stdout is not None
    assert process.stderr is not None
    process.stdout.close()
    wait_until(lambda: _handles(process.pid, signal.SIGTERM), 60)
    process.send_signal(signal.SIGTERM)
    errors = process.stderr.read()
    assert (process.wait(60), errors) == (143, b"")


def test_a_terminal_that_was_closed_gets_nothing_more() -> None:
    leader, follower = pty.openpty()
    process = subprocess.Popen(
        [sys.executable, "-c", _WAITS],
        stdin=follower,
        stdout=follower,
        stderr=follower,
        start_new_session=True,
        preexec_fn=lambda: fcntl.ioctl(0, termios.TIOCSCTTY, 0),
    )
    os.close(follower)
    os.read(leader, 100)
    os.close(leader)  # the kernel sends SIGHUP to the session
    assert process.wait(60) == 129


def _handles(process: int, number: int) -> bool:
    """Whether a process has a handler for a signal."""
    caught = Path(f"/proc/{process}/status").read_text().partition("SigCgt:\t")[2][:16]
    return bool(int(caught, 16) & 1 << (number - 1))


#: An orphan of a container stays a zombie unless the first process there waits for it
_ORPHAN = """
import os, subprocess, time
subprocess.run(["sh", "-c", "sleep 0 & exit"])
def zombies():
    return [one for one in os.listdir("/proc") if one.isdigit() and one != str(os.getpid())
            and open(f"/proc/{one}/stat").read().rpartition(")")[2].split()[0] == "Z"]
while zombies():
    time.sleep(0.01)
assert os.getpid() != 1
"""


@pytest.mark.skipif(os.getuid() != 0, reason="namespaces of processes are for root")
@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGHUP])
def test_the_first_process_of_a_container_passes_signals_on_and_waits_for_orphans(
    number: signal.Signals,
) -> None:
    code = _WAITS.replace("    try:", "    exec(ORPHAN)\n    try:")
    words = ["unshare", "--pid", "--fork", "--mount-proc", "--kill-child", sys.executable, "-c"]
    process = psutil.Popen(
        [*words, f"ORPHAN = {_ORPHAN!r}\n{code}"], stdout=subprocess.PIPE, text=True
    )
    line = process.stdout.readline()
    if not line and process.wait(60) == 1:
        pytest.skip("namespaces are not allowed here")
    assert line.strip() != "1"
    first = process.children()[0]
    first.send_signal(number)
    assert process.stdout.read() == "returned\n"
    assert process.wait(60) == 128 + number
