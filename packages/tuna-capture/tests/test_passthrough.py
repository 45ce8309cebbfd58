"""A program that is run with its output passed on: what it writes, how it ends, and what it leaves
behind."""

from __future__ import annotations

import os
import pty
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from tuna.errors import BadInput
from tuna_capture import passthrough

MARKERS = passthrough.Markers(stdout=(b"log,",), stderr=(b"LOG ",))


def run(script: str, fifo: Path | None = None) -> tuple[int, list[bytes]]:
    """Exit status of a shell script and the lines that were taken."""
    taken: list[bytes] = []
    environment = {**os.environ, "FIFO": str(fifo)}
    status = passthrough.run(["sh", "-c", script], environment, MARKERS, taken.append, fifo=fifo)
    return status, taken


def test_output_is_passed_on_and_lines_of_the_log_are_taken(
    capfdbinary: pytest.CaptureFixture[bytes],
) -> None:
    status, taken = run("printf 'a\\nlog,1\\nb\\0'; printf 'LOG 2\\nLOG\\nlog,3\\n' >&2; exit 7")
    assert (status, sorted(taken)) == (7, [b"LOG 2", b"log,1"])
    assert capfdbinary.readouterr() == (b"a\nb\0", b"LOG\nlog,3\n")


def test_a_crash_gives_its_signal_and_half_a_line() -> None:
    assert run("printf 'log,ha'; kill -SEGV $$") == (-signal.SIGSEGV, [b"log,ha"])


def test_the_environment_and_the_input_are_the_programs(capfd: pytest.CaptureFixture[str]) -> None:
    assert run('echo "$FIFO"; [ -t 0 ] || echo no terminal')[0] == 0
    assert capfd.readouterr().out.startswith("None\n")


def test_lines_in_the_fifo_are_taken_from_all_processes(tmp_path: Path) -> None:
    status, taken = run("echo 1 > $FIFO & wait; (echo 2; printf 3) > $FIFO", tmp_path / "fifo")
    assert (status, sorted(taken)) == (0, [b"1", b"2", b"3"])


def test_a_fifo_takes_more_than_fits_into_it(tmp_path: Path) -> None:
    status, taken = run("seq 100000 > $FIFO", tmp_path / "fifo")
    assert (status, taken[-1], len(taken)) == (0, b"100000", 100_000)


def test_processes_that_outlive_the_program_are_waited_for(
    capfd: pytest.CaptureFixture[str],
) -> None:
    assert run("(sleep 0.3; echo log,late; echo end) & exit 3") == (3, [b"log,late"])
    assert capfd.readouterr().out == "end\n"


def test_a_program_that_is_not_there_is_one_sentence() -> None:
    with pytest.raises(BadInput, match="/no/such/program cannot be started: No such file"):
        passthrough.run(["/no/such/program"], os.environ, MARKERS, lambda line: None)


def test_an_interrupt_reaches_the_program_which_may_go_on() -> None:
    if passthrough._is_in_foreground():
        pytest.skip(
            "in the foreground of a terminal, which would have sent it to the program already"
        )
    before = signal.getsignal(signal.SIGINT)
    taken: list[bytes] = []

    def take(line: bytes) -> None:
        taken.append(line)
        if line == b"log,ready":
            os.kill(os.getpid(), signal.SIGINT)

    script = (
        "trap 'echo log,last; exit 5' INT; echo log,ready; for i in $(seq 900); do sleep 0.1; done"
    )
    status = passthrough.run(["sh", "-c", script], os.environ, MARKERS, take)
    assert (status, taken) == (5, [b"log,ready", b"log,last"])
    assert signal.getsignal(signal.SIGINT) is before


def test_nobody_reading_us_ends_the_program_as_in_a_pipeline() -> None:
    code = (
        "import os, sys; from tuna_capture import passthrough as p; "
        "sys.exit(-p.run(['yes'], os.environ, p.Markers(), lambda line: None))"
    )
    ours = subprocess.Popen([sys.executable, "-c", code], stdout=subprocess.PIPE)
    assert ours.stdout is not None
    assert ours.stdout.read(4) == b"y\ny\n"
    ours.stdout.close()
    assert ours.wait(timeout=30) == signal.SIGPIPE


def test_a_terminal_stays_one_for_the_program() -> None:
    code = (
        "import os, sys; from tuna_capture import passthrough as p; sys.exit(p.run(['sh', '-c',"
        " 'test -t 1 && test ! -t 2 && printf \"a\\nlog,1\\nb\"'], os.environ,"
        " p.Markers((b'log,',)), lambda line: None))"
    )
    ours, theirs = pty.openpty()
    child = subprocess.Popen([sys.executable, "-c", code], stdout=theirs, stderr=subprocess.PIPE)
    os.close(theirs)
    assert child.wait(timeout=30) == 0
    assert os.read(ours, 100) == b"a\r\nb"
    os.close(ours)
    assert child.stderr is not None
    child.stderr.close()
