"""A service on an empty database, and visitors of it."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import httpx
import pytest
from fastapi.testclient import TestClient

from tuna import api
from tuna.db.database import open_database
from tuna.settings import get_settings
from tuna.web.app import Site, create_app

HOST = "127.0.0.1:8080"


@pytest.fixture
def client(home: Path) -> TestClient:
    """A visitor without a token."""
    site = Site(open_database(), get_settings(), [HOST, "localhost:8080"])
    return TestClient(
        create_app(site), f"http://{HOST}", raise_server_exceptions=False, follow_redirects=False
    )


@pytest.fixture
def holder(client: TestClient) -> Callable[..., httpx.Client]:
    """`holder("read")`: a program with a token of this role."""

    def make(role: str, ttl_s: float = 60.0) -> httpx.Client:
        token = api.create_visitor_token(role, ttl_s)  # type: ignore[arg-type]
        return TestClient(
            client.app,
            f"http://{HOST}",
            raise_server_exceptions=False,
            follow_redirects=False,
            headers={"authorization": f"Bearer {token}"},
        )

    return make
