"""How a process of Tuna ends by a signal: SIGTERM, SIGHUP and Ctrl-C ask it to, and it returns what
it has in hand; a second one, or SIGQUIT, asks it to at once. A command ends what it started, which
the same signals may have reached, by SIGTERM and `NOW`.

A signal may interrupt its own handler: the kernel sends that of a parent's death once for each
thread of the parent, so one follows the other while the handler of the first runs.
"""

from __future__ import annotations

import contextlib
import os
import signal
import stat
import sys
import threading
import time
from collections.abc import Callable, Iterator
from typing import NoReturn

#: Signals that ask a process to end
ENDING = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)
#: Sent by a command to what it started, to end at once: shells have what they start in the
#: background ignore SIGQUIT
NOW = signal.SIGUSR2
_AT_ONCE = (signal.SIGQUIT, NOW)
#: Seconds within which several signals count as one: Slurm signals every process and the parent
#: passes its own on, and a terminal signals a container's processes beside its first one
ECHO_S = 0.3

#: What came while signals are held; None: they are not
_held: list[Callable[[], None]] | None = None
#: Called in the main thread with the signal, and whether to end at once
Ask = Callable[[int, bool], None]


class SignalEvent(threading.Event):
    """An event that handlers may set. Within one, `threading.Event.set` waits for ever for the lock
    of the `set` that it interrupted."""

    def __init__(self) -> None:
        super().__init__()
        self._cond = threading.Condition(threading.RLock())


class Interrupted(BaseException):
    """A signal asked this process to end; whoever it passes returns what is in hand. No
    KeyboardInterrupt, which click turns into an error of its own."""

    def __init__(self, number: int, *, at_once: bool = False) -> None:
        super().__init__(name_of(number))
        self.number, self.at_once = number, at_once


#: What ends a call early: in a command, and in a notebook
INTERRUPTS = (Interrupted, KeyboardInterrupt)


def name_of(number: int) -> str:
    """The name of a signal."""
    return signal.Signals(number).name


def exit_code(number: int) -> int:
    """The exit code of a program that a signal ended, as shells show it."""
    return 128 + number


def install(ask: Ask, *, by_command: bool = False) -> Callable[[], None]:
    """Have `ask` called when a signal asks this process to end; returns what undoes that. Call it
    in the main thread.

    An ignored signal stays ignored, as of `nohup`. `by_command`: another process of Tuna started
    this one and says when it ends, by `NOW` if at once: what that one ignores does not count, nor
    what everybody was sent as a repeat.
    """
    first_at: float | None = None

    def handle(number: int, _: object) -> None:
        nonlocal first_at
        _leave_dead_terminal()
        now, at_once = time.monotonic(), number in _AT_ONCE
        if first_at is None:
            first_at = now
        elif not at_once:
            if by_command or now - first_at < ECHO_S:
                return
            at_once = True
        if _held is None or at_once:
            ask(number, at_once)
        else:
            _held.append(lambda: ask(number, at_once))

    before = {
        number: signal.signal(number, handle)
        for number in (*ENDING, *_AT_ONCE)
        if by_command or (number != NOW and signal.getsignal(number) is not signal.SIG_IGN)
    }

    def undo() -> None:
        for number, handler in before.items():
            signal.signal(number, handler)

    return undo


@contextlib.contextmanager
def handling(ask: Ask, *, by_command: bool = False) -> Iterator[None]:
    """`install` for the duration of a `with` block."""
    undo = install(ask, by_command=by_command)
    try:
        yield
    finally:
        undo()


@contextlib.contextmanager
def held() -> Iterator[None]:
    """Ask for what comes during a `with` block after it, unless at once: for what must not be done
    by half, as entering a context is where an exception may come from anywhere."""
    global _held
    if _held is not None or threading.current_thread() is not threading.main_thread():
        yield
        return
    late: list[Callable[[], None]] = []
    _held = late
    try:
        yield
    finally:
        _held = None
        for come in late:
            come()


def interrupt(number: int, at_once: bool) -> None:
    """Raise Interrupted: the `Ask` of commands that return what is in hand on the way out."""
    raise Interrupted(number, at_once=at_once)


def end_at_once(number: int, _: object = None) -> None:
    """End this process, as a handler or an `Ask`: the default action of a signal, which a
    container's first process does not have."""
    os._exit(exit_code(number))


def ignore() -> None:
    """Leave it to the process that started this one when it ends, by SIGKILL."""
    for number in (*ENDING, *_AT_ONCE):
        signal.signal(number, signal.SIG_IGN)


def run_program(program: Callable[[], int]) -> NoReturn:
    """Run a program whose exit code `program` returns, and exit; signals raise Interrupted in
    it."""
    leave_first_process()
    install(interrupt)
    try:
        code = program()
    except Interrupted as error:
        code = exit_code(error.number)
    # Python would tell where in its own end it was interrupted
    for number in (*ENDING, signal.SIGQUIT):
        if signal.getsignal(number) is not signal.SIG_IGN:
            signal.signal(number, end_at_once)
    for stream in filter(None, (sys.stdout, sys.stderr)):
        try:
            stream.flush()
        except OSError:  # nobody reads it any more; Python would say so at its end
            _to_nowhere(stream.fileno())
    raise SystemExit(code)


def leave_first_process() -> None:
    """Go on in a child if this is the first process of a container: signals have no default action
    there, and nobody else waits for the orphans of killed compilers.

    The first process passes signals on, and ends as its child does. Call it before there are
    threads.
    """
    if os.getpid() != 1:
        return
    passed_on = (*ENDING, *_AT_ONCE, signal.SIGUSR1)
    signal.pthread_sigmask(signal.SIG_BLOCK, passed_on)
    if child := os.fork():
        for number in passed_on:
            signal.signal(number, lambda number, _: os.kill(child, number))
    signal.pthread_sigmask(signal.SIG_UNBLOCK, passed_on)
    while child:
        process, status = os.wait()
        if process == child:
            code = os.waitstatus_to_exitcode(status)
            os._exit(code if code >= 0 else exit_code(-code))


def _leave_dead_terminal() -> None:
    """Write to nowhere in place of a terminal that was closed: who ends tells of it."""
    for file in (1, 2):
        with contextlib.suppress(OSError):
            if stat.S_ISCHR(os.fstat(file).st_mode) and not os.isatty(file):
                _to_nowhere(file)


def _to_nowhere(file: int) -> None:
    nowhere = os.open(os.devnull, os.O_WRONLY)
    os.dup2(nowhere, file)
    os.close(nowhere)
