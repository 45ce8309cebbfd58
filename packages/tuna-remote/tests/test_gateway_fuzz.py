"""Random requests of a worker that joined and of strangers: none is answered 5xx, and the work of
others goes on."""

from __future__ import annotations

import threading
import time
from itertools import islice
from urllib.parse import urlsplit

import pytest
from gateway_site import GatewaySite, RemoteDouble
from raw_requests import Answers, RawRequests, logged_in_lines, send_all

from tuna.services import listening
from tuna_remote.gateway import access, requests
from tuna_remote.gateway.tokens import pinned_context

_LEASE = "/v1/leases/{}/{}"
_ROUTES = (
    *("POST /v1/join", "POST /v1/next", "POST /v1/renew", "POST /v1/leave/{}", "GET /{}"),
    *(f"POST {_LEASE}/report", f"POST {_LEASE}/return", f"GET {_LEASE}/elsewhere?place={{}}"),
    *(f"GET {_LEASE}/artifacts/{{}}", f"PUT {_LEASE}/artifacts/{{}}", f"DELETE {_LEASE}"),
)
_FIELDS = (
    *("id", "process", "wait_s", "heartbeat", "leases", "token", "token_secret", "secret", "role"),
    *("facts", "kind", "chunk", "worker", "results", "reason", "place", "version", "remote"),
)


class Attack:
    """Requests of a worker that joined, which follow from a seed."""

    def __init__(self, seed: int, double: RemoteDouble) -> None:
        self._seed, self._double = seed, double
        self._port = urlsplit(double.site.url).port or 0

    def send(self, number: int) -> Answers:
        """Take a chunk, and send so many requests, some of which name it."""
        held = self._double.next()
        lease = held.lease if held else "0" * 32
        credentials = self._double.credentials
        routes = [*_ROUTES, *(route.replace(_LEASE, f"/v1/leases/1/{lease}") for route in _ROUTES)]
        tokens = [f"{credentials.name}.{credentials.secret}"]
        stream = RawRequests(self._seed, "gateway", routes, tokens, _FIELDS, [lease, "1"])
        self._seed += 1
        context = pinned_context(credentials.gateway.pin)
        return send_all(list(islice(stream, number)), self._port, context)


@pytest.fixture(autouse=True)
def _unbounded(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(access, "_RATE", 1e9)
    monkeypatch.setattr(access, "_BURST", 1e9)
    monkeypatch.setattr(access, "_JOIN_BURST", 1e9)
    # Who takes a job and is gone costs it an attempt; on a busy machine the hostile worker is often
    # the first.
    monkeypatch.setenv("TUNA_MAX_ATTEMPTS", "1000000")


@pytest.fixture(autouse=True)
def _hasty(monkeypatch: pytest.MonkeyPatch) -> None:
    """What is cut off is given up soon."""
    monkeypatch.setattr(requests, "_BODY_S", 0.3)
    monkeypatch.setattr(listening, "_HEAD_S", 0.3)
    monkeypatch.setattr(listening, "_KEEP_ALIVE_S", 0.3)


@pytest.mark.parametrize("number", [200, pytest.param(3000, marks=pytest.mark.drill(only=True))])
def test_no_request_is_answered_5xx(site: GatewaySite, number: int) -> None:
    hostile = site.join()
    site.publish()
    with logged_in_lines():
        answers = Attack(number, hostile).send(number)
    print(answers.statuses)
    assert not answers.failed, answers
    assert (
        answers.count(200, 204, 400, 401, 404, 405, 409, 422) > number / 4
    )  # the others are cut off


def test_jobs_end_once_beside_hostile_workers(site: GatewaySite) -> None:
    compiler, measurer, hostile = site.join(), site.join("eval"), site.join()
    stop = threading.Event()
    sent: list[Answers] = []

    def send() -> None:
        attack = Attack(7, hostile)
        while not stop.is_set():
            sent.append(attack.send(20))

    thread = threading.Thread(target=send)
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
    assert sent
    assert not [answers.failed for answers in sent if answers.failed]
