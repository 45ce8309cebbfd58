"""The process of the service, as it is typed."""

from __future__ import annotations

import os
import re
import signal
import stat
import subprocess
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

import httpx
import pytest
import sqlalchemy as sa
from private_servers import wait_until

from tuna.db.database import open_database
from tuna.db.engine import reading
from tuna.db.models import RequestRow, TrialRow


@contextmanager
def serving(home: Path, *words: str, killed: bool = False) -> Iterator[str]:
    """`tuna serve` on any port; yields the link that it prints."""
    command = [sys.executable, "-m", "tuna", "serve", "--listen", "127.0.0.1:0", *words]
    process = subprocess.Popen(
        command, env={**os.environ, "TUNA_HOME": str(home)}, stdout=subprocess.PIPE, text=True
    )
    try:
        assert process.stdout is not None
        yield process.stdout.readline().strip()
        if killed:
            return
        process.send_signal(signal.SIGTERM)
        assert process.wait(60) in (0, -signal.SIGTERM)
    finally:
        process.kill()
        process.wait()


@pytest.mark.service
def test_the_link_of_the_owner_works_and_goes_on_after_a_restart(home: Path) -> None:
    with serving(home) as link:
        found = re.fullmatch(r"(http://127\.0\.0\.1:[0-9]+)/login\?token=([\w.-]+)", link)
        assert found is not None
        headers = {"authorization": f"Bearer {found[2]}"}
        answer = httpx.get(f"{found[1]}/v1/whoami", headers=headers)
        assert answer.json()["role"] == "admin"
        assert httpx.get(link).status_code == 303
    kept = home / "run" / "serve.token"
    assert stat.S_IMODE(kept.stat().st_mode) == 0o600
    assert kept.read_text().strip() == found[2]
    with serving(home) as link:
        assert link.endswith(found[2])


def test_an_address_that_cannot_be_had_is_refused_before_anything_is_written(
    empty_home: Path, type_in: Callable
) -> None:
    for listen in ("0.0.0.0:80", "nonsense", "127.0.0.1:99999"):
        refused = type_in("tuna", "serve", "--listen", listen)
        assert (refused.code, refused.err.count("Error: ")) == (2, 1)
    assert not (empty_home / "run" / "serve.token").exists()


def visitor_of(link: str) -> httpx.Client:
    """A program with the token of a link."""
    address, _, token = link.partition("/login?token=")
    return httpx.Client(base_url=address, headers={"authorization": f"Bearer {token}"}, timeout=60)


def ended(visitor: httpx.Client, number: int) -> dict:
    """A request, once it is over."""
    found: dict = {}

    def is_over() -> bool:
        found.update(visitor.get(f"/v1/requests/{number}").json())
        return found["ended_at"] is not None

    wait_until(is_over, 240, f"end of request {number}: {found}")
    return found


LAYERS = [f"MIOpenDriver gemm -m 8 -n 8 -k {size}" for size in (1, 2, 3)]
ASKED = {"name": "mine", "library": "example", "layers": LAYERS}


@pytest.mark.service
def test_a_request_survives_its_service_and_is_known_from_then_on(
    home: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The service is killed once the request is written down; the next one answers it."""
    monkeypatch.setenv("TUNA_EXAMPLE_PROGRAM", "/bin/true")
    key = {"idempotency-key": "k"}
    with serving(home, killed=True) as link, visitor_of(link) as visitor:
        asked = visitor.post("/v1/requests", json=ASKED, headers=key).json()
        assert asked["state"] == "accepted"
    with serving(home) as link, visitor_of(link) as visitor:
        again = visitor.post("/v1/requests", json=ASKED, headers=key)
        assert (again.status_code, again.json()["id"]) == (200, asked["id"])
        built = ended(visitor, asked["id"])
        assert (built["state"], built["message"]) == ("built", "")
        assert (built["progress"]["exact"], built["progress"]["trials"]) == (3, 3)
        results = visitor.get(f"/v1/requests/{asked['id']}/result?file=results.json").json()
        assert {one["solver"] for one in results} == {"Rocminfo"}
        known = visitor.post("/v1/requests", json=ASKED).json()
        assert (known["state"], known["progress"]["trials"]) == ("known", 0)
    with reading(open_database()) as connection:
        assert connection.execute(sa.select(sa.func.count()).select_from(TrialRow)).scalar() == 3
        keys = connection.execute(sa.select(RequestRow.client_key)).scalars().all()
        assert keys == ["k", None]
    assert not list((home / "uploads").iterdir())
