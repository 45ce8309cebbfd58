"""What keeps running beside a service."""

from __future__ import annotations

from pathlib import Path

import pytest
import sqlalchemy as sa

from tuna.coordinator.coordinator import ALIVE
from tuna.db import database
from tuna.settings import get_settings
from tuna_serve.requests import supervisor
from tuna_serve.requests.supervisor import RequestSupervisor


def test_the_supervisor_looks_through_the_connections_of_the_service(
    home: Path, engine: sa.Engine, monkeypatch: pytest.MonkeyPatch
) -> None:
    (home / ALIVE).touch()  # a coordinator is at work
    monkeypatch.setattr(supervisor, "_EVERY_S", 0.01)
    monkeypatch.setattr(database, "connect_database", lambda: pytest.fail("connects by itself"))
    found: list[object] = []
    ended = supervisor.threading.Event()

    def looked(connection: sa.Connection) -> list[object]:
        found.append(connection.engine)
        if len(found) == 3:
            ended.set()
        return []

    monkeypatch.setattr(supervisor.requests, "unended", looked)
    with RequestSupervisor(get_settings(), engine):
        assert ended.wait(30)
    assert set(found) == {engine}
