"""What a child prints, read without blocking; the end is kept."""

from __future__ import annotations

import os
import subprocess
from typing import Any


class OutputTail:
    """The tail of a child's output, read without blocking."""

    def __init__(self, process: subprocess.Popen[bytes], limit: int) -> None:
        assert process.stdout is not None
        self._pipe, self._limit, self._kept = process.stdout, limit, bytearray()
        self.closed = False
        os.set_blocking(self._pipe.fileno(), False)

    @property
    def readers(self) -> list[Any]:
        """What `select` may wait for."""
        return [] if self.closed else [self._pipe]

    def read(self) -> None:
        """Read what is available, at most a few megabytes, so that a child that never stops cannot
        block this loop."""
        for _ in range(64):
            if self.closed:
                return
            try:
                chunk = os.read(self._pipe.fileno(), 64 << 10)
            except BlockingIOError:
                return
            self.closed = not chunk
            self._kept += chunk
            if len(self._kept) > 2 * self._limit:
                del self._kept[: -self._limit]

    def close(self) -> None:
        """Close our end of the pipe."""
        self.closed = True
        self._pipe.close()

    def text(self) -> str:
        """The end of what was read."""
        return bytes(self._kept[-self._limit :]).decode("utf-8", "replace")
