"""A gateway that runs, with a session."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest
import redis
from gateway_site import GatewaySite, open_site


@pytest.fixture()
def site(
    home: Path,
    redis_client: redis.Redis,
    redis_urls: dict[str, str],
    monkeypatch: pytest.MonkeyPatch,
) -> Iterator[GatewaySite]:
    with open_site(home, redis_client, redis_urls, monkeypatch) as found:
        yield found
