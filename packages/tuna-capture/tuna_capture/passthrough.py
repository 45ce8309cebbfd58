"""Runs a program in the foreground and takes the lines of logs out of its output.

Its standard input is ours; its stdout and stderr are passed on at once, each in its order. If a
stream of ours is a terminal, it is one for the program too.
"""

from __future__ import annotations

import contextlib
import errno
import fcntl
import os
import re
import selectors
import signal
import subprocess
import termios
import threading
import tty
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from types import FrameType

from tuna.errors import BadInput

#: Length above which a log line is passed on as the program's own.
LINE_BYTES = 1 << 16
_READ_BYTES = 1 << 16
_PAUSE_S = 0.05
#: Seconds without output after the program has ended, until `waiting` is called.
_PATIENCE_S = 2.0


@dataclass(frozen=True)
class Markers:
    """Beginnings of log lines, by the stream that they come in."""

    stdout: Sequence[bytes] = ()
    stderr: Sequence[bytes] = ()


def run(
    command: Sequence[str],
    environment: Mapping[str, str],
    markers: Markers,
    take: Callable[[bytes], None],
    *,
    fifo: Path | None = None,
    waiting: Callable[[], None] = lambda: None,
) -> int:
    """Run `command` to its end and return its exit status, -N if signal N ended it.

    `take` gets each line of a log: those in the output of the program and of all processes that it
    starts, and those that come through `fifo`. It waits, as a pipeline of the shell does, until all
    of them have closed their output; `waiting` is called once if that takes long, and then the next
    Ctrl-C ends the waiting. Raises BadInput for a program that cannot be started.
    """
    with contextlib.ExitStack() as stack:
        streams = []
        for descriptor, beginnings in ((1, markers.stdout), (2, markers.stderr)):
            streams.append(_Stream(descriptor, LogFilter(beginnings, take)))
            stack.callback(streams[-1].close)
        reader = _Fifo(fifo, take) if fifo is not None else None
        if reader is not None:
            stack.callback(reader.close)
        interrupts = stack.enter_context(_signals())
        try:
            child = subprocess.Popen(
                list(command),
                env=dict(environment),
                stdout=streams[0].child_end,
                stderr=streams[1].child_end,
            )
        except OSError as error:
            raise BadInput(f"{command[0]} cannot be started: {error.strerror}") from None
        except ValueError as error:
            raise BadInput(f"the command cannot be started: {error}") from None
        interrupts.child = child
        for stream in streams:
            os.close(stream.child_end)
            stream.child_end = -1
        _pump(child, streams, reader, interrupts, waiting)
        return child.wait()


class _Stream:
    """A stream of the program, passed on to our `descriptor`."""

    def __init__(self, descriptor: int, log: LogFilter) -> None:
        self._descriptor, self.log = descriptor, log
        self.ours, self.child_end = _terminal(descriptor) if os.isatty(descriptor) else os.pipe()
        self.is_open = True

    def read(self) -> bool:
        """Pass on what has come; False at the end."""
        try:
            data = os.read(self.ours, _READ_BYTES)
        except OSError as error:
            if error.errno != errno.EIO:  # a terminal whose other end is closed
                raise
            data = b""
        self.write(self.log.feed(data) if data else self.log.close())
        self.is_open = self.is_open and bool(data)
        return self.is_open

    def write(self, data: bytes) -> None:
        """Pass on all of the bytes."""
        try:
            while data:
                data = data[os.write(self._descriptor, data) :]
        except BrokenPipeError:
            self.is_open = False  # closing the pipe gives the program the same error

    def close(self) -> None:
        """Close both descriptors."""
        for end in (self.ours, self.child_end):
            if end >= 0:
                os.close(end)
        self.ours = self.child_end = -1


class _Fifo:
    """Lines that libraries write into a named pipe."""

    def __init__(self, path: Path, take: Callable[[bytes], None]) -> None:
        os.mkfifo(path, 0o600)
        # Opened for writing too, so that opening it never blocks a program, and so that it does not
        # end with one.
        self.ours = os.open(path, os.O_RDWR | os.O_NONBLOCK | os.O_CLOEXEC)
        self._take, self._held = take, b""

    def read(self) -> bool:
        """Take the lines that have come; False if there are none."""
        try:
            data = os.read(self.ours, _READ_BYTES)
        except BlockingIOError:
            return False
        *lines, self._held = (self._held + data).split(b"\n")
        for line in lines:
            self._take(line)
        if len(self._held) > _READ_BYTES:  # an endless line is taken in pieces
            self._take(self._held)
            self._held = b""
        return True

    def close(self) -> None:
        """Take the last line, whole or not."""
        if self._held:
            self._take(self._held)
        os.close(self.ours)


class _Interrupts:
    """Signals to this process while the program runs."""

    def __init__(self) -> None:
        self.child: subprocess.Popen[bytes] | None = None
        self.gives_up = False  #: a signal came after the program had ended

    def handle(self, number: int, _frame: FrameType | None) -> None:
        """Pass a signal on, except for a Ctrl-C that the terminal has sent to the program too."""
        if self.child is None:
            return
        if self.child.poll() is not None:
            self.gives_up = True
        elif number != signal.SIGINT or not _is_in_foreground():
            self.child.send_signal(number)


@contextlib.contextmanager
def _signals() -> Iterator[_Interrupts]:
    interrupts = _Interrupts()
    before = {}
    if threading.current_thread() is threading.main_thread():
        for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
            if signal.getsignal(number) is not signal.SIG_IGN:  # the program ignores it too, then
                before[number] = signal.signal(number, interrupts.handle)
    try:
        yield interrupts
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)


def _is_in_foreground() -> bool:
    """Whether we are in the foreground of a terminal, which sends Ctrl-C to all processes there."""
    try:
        terminal = os.open("/dev/tty", os.O_RDONLY | os.O_NOCTTY | os.O_CLOEXEC)
    except OSError:
        return False
    try:
        return os.tcgetpgrp(terminal) == os.getpgrp()
    except OSError:
        return False
    finally:
        os.close(terminal)


def _pump(
    child: subprocess.Popen[bytes],
    streams: Sequence[_Stream],
    fifo: _Fifo | None,
    interrupts: _Interrupts,
    waiting: Callable[[], None],
) -> None:
    with selectors.DefaultSelector() as selector:
        sources: list[_Stream | _Fifo] = [*streams, *([fifo] if fifo is not None else [])]
        for source in sources:
            selector.register(source.ours, selectors.EVENT_READ, source)
        quiet_s, told = 0.0, False
        while child.poll() is None or (
            any(stream.is_open for stream in streams) and not interrupts.gives_up
        ):
            ready = selector.select(_PAUSE_S)
            for key, _ in ready:
                source = key.data
                if not source.read() and isinstance(source, _Stream):
                    selector.unregister(source.ours)
                    source.close()
            if ready:
                quiet_s = 0.0
                continue
            for stream in streams:
                if stream.is_open:
                    stream.write(stream.log.pause())
            if child.poll() is not None and not told:
                quiet_s += _PAUSE_S
                if quiet_s >= _PATIENCE_S:
                    told = True
                    waiting()
        while fifo is not None and fifo.read():
            pass
        for stream in streams:
            if stream.is_open:
                stream.write(stream.log.close())


def _terminal(like: int) -> tuple[int, int]:
    """Return both ends of a raw pseudo-terminal of the same size."""
    ours, theirs = os.openpty()
    tty.setraw(theirs)
    with contextlib.suppress(OSError):
        size = fcntl.ioctl(like, termios.TIOCGWINSZ, bytes(8))
        fcntl.ioctl(theirs, termios.TIOCSWINSZ, size)
    return ours, theirs


class LogFilter:
    """Splits a stream of bytes into lines that begin with a marker and the rest.

    A log line ends with its line feed. It may begin in the middle of a line of the program, which
    then goes on behind it: both are written to one stream.
    """

    def __init__(self, markers: Sequence[bytes], take: Callable[[bytes], None]) -> None:
        """`take` gets each line that begins with one of `markers`, without its line feed."""
        self._markers = tuple(markers)
        self._search = re.compile(b"|".join(map(re.escape, markers))).search if markers else None
        self._longest = max(map(len, markers), default=0)
        self._take = take
        self._held = b""

    def feed(self, data: bytes) -> bytes:
        """Return the bytes to pass on after `data`; the start of a log line is held back."""
        if self._search is None:
            return data
        data = self._held + data if self._held else data
        passed: list[bytes] = []
        place = 0
        while True:
            marker = self._search(data, place)
            if marker is None:
                end = len(data) - self._beginning(data, place)
                passed.append(data[place:end])
                self._held = data[end:]
                break
            passed.append(data[place : marker.start()])
            end = data.find(b"\n", marker.end())
            if end < 0:
                self._held = data[marker.start() :]
                if len(self._held) > LINE_BYTES:
                    passed.append(self._held)
                    self._held = b""
                break
            self._take(data[marker.start() : end])
            place = end + 1
        return b"".join(passed)

    def pause(self) -> bytes:
        """Return the bytes held back, unless they begin a log line; called when nothing comes."""
        if self._held.startswith(self._markers):
            return b""
        held, self._held = self._held, b""
        return held

    def close(self) -> bytes:
        """Return the last bytes to pass on; half a log line is taken."""
        if self._held.startswith(self._markers):
            self._take(self._held)
            self._held = b""
        return self.pause()

    def _beginning(self, data: bytes, place: int) -> int:
        """Return the length of the longest beginning of a marker at the end of `data`."""
        for length in range(min(self._longest - 1, len(data) - place), 0, -1):
            tail = data[-length:]
            if any(marker.startswith(tail) for marker in self._markers):
                return length
        return 0
