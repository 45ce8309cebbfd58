"""A double of the server."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
from space_double import SpaceDouble, space_double

from tuna_cache_client import remote_space


@pytest.fixture
def server() -> Iterator[SpaceDouble]:
    with space_double() as double:
        yield double


@pytest.fixture
def in_space(server: SpaceDouble, monkeypatch: pytest.MonkeyPatch) -> Iterator[SpaceDouble]:
    """The double as the space of this process."""
    monkeypatch.setenv(remote_space.LINE, server.line)
    monkeypatch.setenv(remote_space.TIMEOUT, "10000")
    remote_space.remote_space.cache_clear()
    yield server
    remote_space.remote_space.cache_clear()
