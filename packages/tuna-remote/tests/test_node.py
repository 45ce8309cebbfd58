"""The main process of a remote worker, whose gateway does not answer."""

from __future__ import annotations

import mmap
import os
import threading
import time
from collections.abc import Callable, Iterator
from multiprocessing import connection, get_context
from typing import Any

import pytest

from tuna.common.restarts import Restarts
from tuna.settings import Settings
from tuna_remote.gateway import node
from tuna_remote.gateway.node import RemoteNode, _Child


class SilentGateway:
    """A link whose requests wait until the gateway answers."""

    answers = threading.Event()
    forfeited: list[str]

    def __init__(self, *_: Any) -> None:
        self.client = self

    def forfeit(self, lease: str) -> None:
        assert self.answers.wait(60)
        self.forfeited.append(lease)

    def leave(self) -> None:
        pass

    def close(self) -> None:
        pass


@pytest.fixture()
def gateway(monkeypatch: pytest.MonkeyPatch) -> Iterator[type[SilentGateway]]:
    SilentGateway.answers, SilentGateway.forfeited = threading.Event(), []
    monkeypatch.setattr(node, "GatewayLink", SilentGateway)
    yield SilentGateway
    SilentGateway.answers.set()


class CountingNode(RemoteNode):
    """A node that counts the processes that it would start."""

    started = 0

    def _start(self) -> None:
        self.started += 1


@pytest.fixture()
def worker(monkeypatch: pytest.MonkeyPatch) -> CountingNode:
    monkeypatch.setattr(node, "eval_cpus", lambda _: ())
    monkeypatch.setattr(node, "role_queues", lambda *_: [])
    return CountingNode(Settings(), "compile", 2)


def child(act: Callable[[], None], *leases: str) -> _Child:
    """A process that does `act`, with the leases that it holds."""
    ours, _ = connection.Pipe()
    process = get_context("fork").Process(target=act)
    process.start()
    return _Child(process, ours, time.monotonic(), set(leases))


def test_a_process_that_died_stops_no_other_ones_time_limit(
    worker: CountingNode, gateway: type[SilentGateway], eventually: Callable[..., None]
) -> None:
    dead, late = child(lambda: os._exit(1), "a lease"), child(lambda: time.sleep(600))
    late.deadline = 0.0
    worker._children = [dead, late]
    eventually(lambda: worker._wait() or worker._children == [late], 60)
    worker._enforce_limits()
    late.process.join(60)
    assert late.process.exitcode == -9
    assert gateway.forfeited == []  # the gateway has not answered yet
    worker._starts_at = [0.0]
    worker._restart()
    assert worker.started == 0, "forked while a thread runs"
    gateway.answers.set()
    eventually(lambda: gateway.forfeited == ["a lease"], 60)
    eventually(lambda: worker._restart() or worker.started == 1, 60)
    assert worker._starts_at == []


def test_a_process_that_died_is_started_again_after_a_pause(
    worker: CountingNode, gateway: type[SilentGateway], eventually: Callable[..., None]
) -> None:
    gateway.answers.set()
    worker._children = [child(lambda: os._exit(1))]
    eventually(lambda: worker._wait() or not worker._children, 60)
    (due_at,) = worker._starts_at
    assert due_at > time.monotonic() - 60 + Restarts().pause_s(lived_s=0.0)
    worker._starts_at = [time.monotonic() + 600]
    worker._restart()
    assert worker.started == 0
    worker._ends = "SIGTERM"  # it ends: no process is started any more
    worker._restart()
    assert worker._starts_at == []
    assert isinstance(worker._shared, mmap.mmap)
