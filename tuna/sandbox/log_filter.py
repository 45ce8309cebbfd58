"""Filter that takes a log's lines out of a program's output and passes on the rest unchanged."""

from __future__ import annotations

import re
from collections.abc import Callable, Sequence

#: Length above which a log line is passed on as the program's own.
LINE_BYTES = 1 << 16


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
        self.too_long = 0  #: log lines that were passed on because they were too long

    def feed(self, data: bytes) -> bytes:
        """Return the bytes to pass on after `data`; the start of a log line is held back."""
        if self._search is None:
            return data
        data = self._held + data if self._held else data
        passed: list[bytes] = []
        place = 0
        while True:
            found = self._search(data, place)
            if found is None:
                end = len(data) - self._beginning(data, place)
                passed.append(data[place:end])
                self._held = data[end:]
                break
            passed.append(data[place : found.start()])
            end = data.find(b"\n", found.end())
            if end < 0:
                self._held = data[found.start() :]
                if len(self._held) > LINE_BYTES:
                    self.too_long += 1
                    passed.append(self._held)
                    self._held = b""
                break
            self._take(data[found.start() : end])
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
