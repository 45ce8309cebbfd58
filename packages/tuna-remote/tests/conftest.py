"""A gateway that runs, with a session; processes that are killed when a test ends; a database with
six sessions."""

from __future__ import annotations

import shutil
from collections.abc import Iterator
from pathlib import Path

import pytest
import redis
import sqlalchemy as sa
from baseline_database import upgraded
from fork_server import ForkServer
from gateway_site import GatewaySite, open_site
from processes import Processes, stop_redis

from tuna.db.engine import make_engine
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


@pytest.fixture(scope="session")
def _upgraded(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return upgraded(tmp_path_factory.mktemp("baseline"))


@pytest.fixture()
def source(_upgraded: Path, tmp_path: Path) -> sa.Engine:
    """A copy of a database with the baseline's schema, upgraded."""
    return make_engine(f"sqlite:///{shutil.copy(_upgraded, tmp_path / 'source.sqlite')}")
