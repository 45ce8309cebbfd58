"""A Redis of a test's own, on a loopback port, whose default user administers it with a password."""

from __future__ import annotations

import contextlib
import socket
import subprocess
import time
from collections.abc import Iterator

import redis

from tuna.embedded_redis import program

_START_S = 20.0


def free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


@contextlib.contextmanager
def redis_on_port(password: str) -> Iterator[str]:
    """Its URL without a password."""
    port = free_port()
    words = ["--bind", "127.0.0.1", "--port", str(port), "--save", "", "--requirepass", password]
    process = subprocess.Popen([program(), *words], stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
    try:
        client = redis.Redis(port=port, password=password)
        deadline = time.monotonic() + _START_S
        while True:
            with contextlib.suppress(redis.ConnectionError):
                client.ping()
                break
            assert process.poll() is None
            assert time.monotonic() < deadline, "Redis did not start"
            time.sleep(0.02)
        yield f"redis://127.0.0.1:{port}/0"
    finally:
        process.kill()
        process.wait()


def with_password(url: str, password: str, user: str = "") -> str:
    return url.replace("redis://", f"redis://{user}:{password}@")
