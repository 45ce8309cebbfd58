"""The embedded services, with processes that are killed when a test ends."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest
import sqlalchemy as sa
from fork_server import ForkServer
from processes import Processes, stop_redis
from settings_changes import change_setting

from tuna.db.engine import make_engine
from tuna.settings import get_settings


@pytest.fixture()
def engine(tuna_home: Path, monkeypatch: pytest.MonkeyPatch) -> sa.Engine:
    """The embedded database, with a lease that expires soon."""
    change_setting(monkeypatch, "TUNA_LEASE_S", "2")
    return make_engine(get_settings().sql_url)


@pytest.fixture()
def processes(
    engine: sa.Engine, tuna_home: Path, tuna_forks: ForkServer | None
) -> Iterator[Processes]:
    made = Processes(tuna_home, tuna_forks)
    yield made
    made.kill_all()
    stop_redis()
