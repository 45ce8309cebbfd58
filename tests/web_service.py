"""The service as it is typed, in a process of its own."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import httpx


@contextmanager
def serving(home: Path, *words: str, killed: bool = False) -> Iterator[str]:
    """`tuna serve` on any port; yields the link that it prints."""
    command = [sys.executable, "-m", "tuna", "serve", "--listen", "127.0.0.1:0", *words]
    process = subprocess.Popen(
        command, env={**os.environ, "TUNA_HOME": str(home)}, stdout=subprocess.PIPE, text=True
    )
    try:
        assert process.stdout is not None
        yield process.stdout.readline().strip()
        if killed:
            return
        process.send_signal(signal.SIGTERM)
        assert process.wait(60) in (0, -signal.SIGTERM)
    finally:
        process.kill()
        process.wait()


def visitor_of(link: str) -> httpx.Client:
    """A program with the token of a link."""
    address, _, token = link.partition("/login?token=")
    return httpx.Client(base_url=address, headers={"authorization": f"Bearer {token}"}, timeout=60)
