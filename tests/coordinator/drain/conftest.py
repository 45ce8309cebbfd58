"""A drain on an empty database."""

from __future__ import annotations

from pathlib import Path

import pytest
import redis
import sqlalchemy as sa
from drained_reports import MAX

from tuna.artifacts.store import Artifacts
from tuna.coordinator.drain import Drain
from tuna.queue.results import ResultStream


@pytest.fixture()
def drain(engine: sa.Engine, redis_client: redis.Redis, tmp_path: Path) -> Drain:
    stream = ResultStream(redis_client, "results", "me")
    return Drain(engine, stream, Artifacts((tmp_path / "a").as_uri(), tmp_path / "c"), MAX)
