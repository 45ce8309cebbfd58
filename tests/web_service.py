"""The service as it is typed, in a process of its own."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from pathlib import Path
from types import TracebackType

import httpx


class Service:
    """`tuna serve` of a home, at a free port or at an address; `link` is what it prints."""

    def __init__(self, home: Path, address: str = "http://127.0.0.1:0") -> None:
        listen = address.removeprefix("http://")
        self.process = subprocess.Popen(
            [sys.executable, "-m", "tuna", "serve", "--listen", listen],
            env={**os.environ, "TUNA_HOME": str(home)},
            stdout=subprocess.PIPE,
            text=True,
        )
        assert self.process.stdout is not None
        self.link = self.process.stdout.readline().strip()
        self.address, _, self.token = self.link.partition("/login?token=")

    def visitor(self) -> httpx.Client:
        """Return a program with the owner's token."""
        headers = {"authorization": f"Bearer {self.token}"}
        return httpx.Client(base_url=self.address, headers=headers, timeout=60)

    def __enter__(self) -> Service:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        """End it by the signal of Ctrl-C's kind, unless it is gone."""
        try:
            if self.process.poll() is None and error is None:
                self.process.send_signal(signal.SIGTERM)
                assert self.process.wait(60) in (0, -signal.SIGTERM)
        finally:
            self.process.kill()
            self.process.wait()
