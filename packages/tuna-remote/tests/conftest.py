"""A gateway that runs, with a session; processes that are killed when a test ends."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest
import redis
from fork_server import ForkServer
from gateway_site import GatewaySite, open_site
from processes import Processes, stop_redis

from tuna.settings import get_settings


@pytest.fixture()
def site(
    home: Path,
    redis_client: redis.Redis,
    redis_urls: dict[str, str],
    monkeypatch: pytest.MonkeyPatch,
) -> Iterator[GatewaySite]:
    with open_site(home, redis_client, redis_urls, monkeypatch) as found:
        yield found


@pytest.fixture()
def processes(
    tuna_home: Path, tuna_forks: ForkServer | None, monkeypatch: pytest.MonkeyPatch
) -> Iterator[Processes]:
    """Programs of one home, whose leases expire soon."""
    monkeypatch.setenv("TUNA_LEASE_S", "2")
    get_settings.cache_clear()
    made = Processes(tuna_home, tuna_forks)
    yield made
    made.kill_all()
    stop_redis()
