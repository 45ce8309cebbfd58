"""The private Redis ends with the last process that uses it."""

from __future__ import annotations

import os
import signal
from collections.abc import Iterator
from pathlib import Path

import pytest

from tuna.embedded_redis import EmbeddedRedis


@pytest.fixture()
def server(tmp_path: Path) -> Iterator[EmbeddedRedis]:
    made = EmbeddedRedis(tmp_path / "run")
    made.acquire()
    yield made
    made.release()


def test_the_last_user_stops_it(server: EmbeddedRedis, tmp_path: Path) -> None:
    other = EmbeddedRedis(tmp_path / "run")
    other.acquire()
    server.release()
    assert other.running()
    other.release()
    assert not other.running()


def test_a_forked_child_that_still_lives_is_no_user(server: EmbeddedRedis) -> None:
    """A pool process is killed with its worker, and may end a little after it."""
    began, begin = os.pipe()
    child = os.fork()
    if not child:
        os.write(begin, b".")
        signal.pause()
        os._exit(0)
    try:
        os.read(began, 1)
        server.release()
        assert not server.running()
    finally:
        os.kill(child, signal.SIGKILL)
        os.waitpid(child, 0)
        os.close(began)
        os.close(begin)
