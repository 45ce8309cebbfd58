"""Random requests of a worker that joined and of strangers: none is answered 5xx, and the work of
others goes on."""

from __future__ import annotations

import json
import random
import threading
import time
from collections import Counter
from typing import Any

import httpx
import pytest
from gateway_site import GatewaySite, RemoteDouble

from tuna_remote.gateway import access

_PATHS = (
    "/join",
    "/next",
    "/renew",
    "/leave/1",
    "/leases/{process}/{lease}",
    "/leases/{process}/{lease}/report",
    "/leases/{process}/{lease}/return",
    "/leases/{process}/{lease}/elsewhere?place={text}",
    "/leases/{process}/{lease}/artifacts/{digest}",
    "/{text}",
)
_TEXTS = ("", "x", "../..", "%00", "%2e%2e%2f", "\u202e", "0" * 32, "f" * 64, "-1", "9" * 400, "*")
_VALUES: tuple[Any, ...] = (
    None,
    True,
    -1,
    0,
    1,
    2**63,
    10**30,
    1.5,
    "",
    "x",
    "\x1b[2J",
    "0" * 32,
    "a" * 70_000,
    [],
    {},
    [[[]]],
)
_FIELDS = (
    "id",
    "process",
    "wait_s",
    "heartbeat",
    "leases",
    "token",
    "token_secret",
    "secret",
    "role",
    "facts",
    "kind",
    "chunk",
    "worker",
    "results",
    "reason",
    "place",
    "version",
    "remote",
)


class Fuzz:
    """Requests that follow from a seed."""

    def __init__(self, seed: int, double: RemoteDouble) -> None:
        self._random = random.Random(seed)
        self._double = double
        self._lease = "0" * 32

    def send(self) -> int:
        """Send the next request; returns the status, 0 where the gateway closed the connection."""
        pick = self._random.choice
        if self._random.random() < 0.1 and (held := self._double.next()) is not None:
            self._lease = held.lease
        path = pick(_PATHS).format(
            process=pick(("1", "0", "-1", "x", "9" * 30)),
            lease=pick((self._lease, self._lease, *_TEXTS)),
            digest=pick(_TEXTS),
            text=pick(_TEXTS),
        )
        method = pick(("GET", "POST", "POST", "POST", "PUT", "DELETE", "PATCH", "HEAD"))
        headers = pick(({}, {}, {}, {"authorization": pick(_TEXTS).encode().hex()}))
        try:
            return self._double.http.request(
                method, path, content=self._body(), headers=headers
            ).status_code
        except (httpx.TransportError, httpx.InvalidURL):
            return 0

    def _body(self) -> bytes:
        pick = self._random.choice
        if self._random.random() < 0.2:
            return self._random.randbytes(self._random.randrange(300))
        found = {pick(_FIELDS): pick(_VALUES) for _ in range(self._random.randrange(8))}
        if self._random.random() < 0.3:
            found |= {"id": "f" * 32, "process": 1}
        return json.dumps(found).encode()


@pytest.fixture(autouse=True)
def _unbounded(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(access, "_RATE", 1e9)
    monkeypatch.setattr(access, "_BURST", 1e9)
    monkeypatch.setattr(access, "_JOIN_BURST", 1e9)
    # Who takes a job and is gone costs it an attempt; on a busy machine the hostile worker is often
    # the first.
    monkeypatch.setenv("TUNA_MAX_ATTEMPTS", "1000000")


@pytest.mark.parametrize("number", [150, pytest.param(2000, marks=pytest.mark.drill(only=True))])
def test_no_request_is_answered_5xx(site: GatewaySite, number: int) -> None:
    hostile = site.join()
    site.publish()
    fuzz = Fuzz(number, hostile)
    statuses = Counter(fuzz.send() for _ in range(number))
    assert not [status for status in statuses if status >= 500], statuses
    assert sum(statuses[code] for code in (200, 204, 401, 404, 405, 409, 422)) > number / 2


def test_jobs_end_once_beside_hostile_workers(site: GatewaySite) -> None:
    compiler, measurer, hostile = site.join(), site.join("eval"), site.join()
    stop = threading.Event()
    statuses: list[int] = []

    def attack() -> None:
        fuzz = Fuzz(7, hostile)
        while not stop.is_set():
            statuses.append(fuzz.send())

    thread = threading.Thread(target=attack)
    thread.start()
    try:
        deadline = time.monotonic() + 120
        while not site.is_done():
            assert time.monotonic() < deadline
            site.turn()
            if len(site.leases.all()) and not site.leases.untaken():
                site.leases.evict(hostile.name)  # as when its lease expires
            compiler.work()
            measurer.work()
    finally:
        stop.set()
        thread.join()
    assert site.each_once()
    assert statuses
    assert max(statuses) < 500
