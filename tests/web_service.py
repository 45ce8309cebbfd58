"""The service as it is typed, in a process of its own; an application on a port of this machine."""

from __future__ import annotations

import os
import signal
import ssl
import subprocess
import sys
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import httpx

from tuna.services.listening import BoundedServer, Listener
from tuna.services.ports import listen


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


@contextmanager
def served(app: Any, tls: ssl.SSLContext | None = None, port: int = 0) -> Iterator[int]:
    """An application that is served in a thread; yields its port."""
    (listening,) = listen("127.0.0.1", port)
    server = BoundedServer(Listener([listening], app, tls))
    with listening:
        thread = threading.Thread(target=server.run, daemon=True)
        thread.start()
        try:
            yield int(listening.getsockname()[1])
        finally:
            server.should_exit = server.force_exit = True
            thread.join(60)
