"""A remote worker, a holder of a token and a stranger try what they must not: docs/security.md."""

from __future__ import annotations

import hashlib
import itertools
import json
import socket
import ssl
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import httpx
import pytest
import sqlalchemy as sa
from command_lines import Ended
from gateway_site import COMPILES, GatewaySite, raw

from tuna.db.engine import reading
from tuna.db.models import DeviceRow, StepResultRow, TokenRow
from tuna.errors import BadInput, ServiceError
from tuna.libraries.items import DeviceReport
from tuna.queue.leases import new_id
from tuna.settings import get_settings
from tuna_remote.gateway import server
from tuna_remote.gateway.https_client import join
from tuna_remote.gateway.tokens import JoinToken, pin_of_secret, pinned_context, server_context

Eventually = Callable[[Callable[[], object], float], None]
MIB = 1 << 20


# -- leases and reports


def test_a_lease_of_another_worker_cannot_be_named(site: GatewaySite) -> None:
    """Neither renewed, reported on, returned, given up, nor read."""
    victim, thief = site.join(), site.join()
    held = victim.held()
    assert thief.report(held, held.report()) == 409
    assert thief.post(thief.path(held, "/return")).status_code == 409
    assert thief.renew(held).json()["lost"] == [held.lease]
    assert thief.http.delete(thief.path(held)).status_code == 204
    assert thief.put(held, b"x") == 409
    assert thief.http.get(thief.path(held, "/elsewhere")).status_code == 409
    for process in (f"1%2F..%2F{victim.name}:1", f"..%2f{victim.name}:1", f"{victim.name}:1"):
        answer = thief.post(f"/leases/{process}/{held.lease}/report", held.report().to_json())
        assert answer.status_code == 404
    assert victim.renew(held).json()["lost"] == [], "it still holds its chunk"
    assert victim.report(held, held.report()) == 204


def test_a_report_counts_as_its_workers_own_whoever_it_names(site: GatewaySite) -> None:
    liar = site.join()
    held = liar.held()
    said = held.report(worker="own:7", place="own/GPU-1", remote="another", reason="x" * 9000)
    assert liar.report(held, said) == 204
    report = site.results()[-1]
    assert (report.worker, report.remote, report.place) == (f"{liar.name}:1", liar.name, liar.name)
    assert len(report.reason) == 2000


def test_results_of_other_jobs_and_chunks_are_refused(site: GatewaySite) -> None:
    site.coordinator.publisher._settings = site.settings.model_copy(update={"claim_batch": 5})
    liar, other = site.join(), site.join()
    held, theirs = liar.held(), other.held()
    assert liar.report(held, held.report(results=theirs.results())) == 422
    assert liar.report(held, theirs.report()) == 422
    assert liar.report(held, held.report("started", results=held.results())) == 422
    assert other.report(theirs, theirs.report()) == 204


def test_a_replayed_report_has_no_effect(site: GatewaySite) -> None:
    worker = site.join()
    held = worker.held()
    said = held.report("results", results=held.results())
    assert [worker.report(held, said) for _ in range(3)] == [204, 204, 422]
    assert worker.report(held, held.report("finished", results=[])) == 204
    assert worker.report(held, held.report()) == 409
    site.coordinator.drain.once()
    with reading(site.engine) as connection:
        good = connection.execute(sa.select(sa.func.count()).where(StepResultRow.ok)).scalar_one()
    assert good == len(held.chunk.items)


def test_more_trials_than_a_chunk_can_give_are_refused(site: GatewaySite) -> None:
    liar = site.join()
    held = liar.held()
    trials = [{"index": number, "params": "{}"} for number in range(9000)]
    results = [json.loads(one.model_dump_json()) | {"trials": trials} for one in held.results()[:2]]
    body = {"kind": "finished", "chunk": held.chunk.id, "worker": "w", "results": results}
    assert liar.report(held, json.dumps(body)) == 422
    assert site.results()[-1].kind == "started"


def test_an_unreadable_report_is_refused(site: GatewaySite) -> None:
    liar = site.join()
    held = liar.held()
    for body in (
        *(b"", b"[" * 60_000, b'{"kind": "finished"}', b"\xff\xfe\x00"),
        b'{"kind": "finished", "chunk": "\\ud800", "worker": "w"}',
        b'{"kind": "lost", "chunk": "c", "worker": "w"}',
        json.dumps({"kind": "finished", "chunk": "c", "worker": "w", "x": 10**400}),
    ):
        assert liar.report(held, body) == 422, body[:60]
    assert liar.report(held, held.report()) == 204


def test_a_device_that_it_names_is_its_own(site: GatewaySite) -> None:
    compiler, liar = site.join(), site.join("eval")
    site.turn()
    compiler.work()
    site.turn()
    held = liar.held()
    device = DeviceReport(name="card", peak_gflops=1e8)
    results = [
        one.model_copy(update={"device": device})
        for one in held.results(time_ms=1.0, times_ms=(1.0,))
    ]
    assert liar.report(held, held.report(results=results)) == 204
    site.coordinator.drain.once()
    with reading(site.engine) as connection:
        names = set(connection.execute(sa.select(DeviceRow.name)).scalars())
    assert names == {f"card of {liar.name}"}


def test_texts_that_it_sends_do_nothing_to_a_terminal(
    site: GatewaySite, type_in: Callable[..., Ended]
) -> None:
    liar = site.join()
    assert liar.renew(device="\x1b]0;x\x07\n", aside="\x1b[2J").status_code == 200
    said = type_in("tuna", "workers")
    assert "\x1b" not in said.out + said.err
    held = liar.held()
    failed = [
        one.model_copy(update={"ok": False, "output_tail": "\x1b[2J\nforged"})
        for one in held.results()
    ]
    assert liar.report(held, held.report(results=failed)) == 204
    site.coordinator.drain.once()
    said = type_in("tuna", "status", "--session-id", "1")
    assert "\x1b" not in said.out + said.err


def test_a_worker_that_returns_all_that_it_gets_does_not_keep_jobs_from_others(
    site: GatewaySite,
) -> None:
    compiler, measurer, hostile = site.join(), site.join("eval"), site.join()
    deadline = time.monotonic() + 60
    while not site.is_done():
        assert time.monotonic() < deadline
        site.turn()
        if (held := hostile.next()) is not None:
            assert hostile.report(held, held.report("returned")) == 204
        compiler.work()
        measurer.work()
    assert site.each_once()


# -- artifacts


def test_the_name_of_an_artifact_is_no_path(site: GatewaySite) -> None:
    worker = site.join()
    held = worker.held()
    before = sorted(Path(site.settings.home).rglob("*"))
    for name in (
        *("..%2f..%2ftuna.sqlite", "../../tuna.sqlite", "%2e%2e/%2e%2e/etc/passwd"),
        *("tuna-artifacts", "A" * 64, "0" * 63, "0" * 64 + "%00", "０" * 64),
        *("0" * 64 + ".01234567", "0" * 64 + ".build", "%0a" + "0" * 64),
    ):
        path = worker.path(held, f"/artifacts/{name}")
        assert worker.http.get(path).status_code in (404, 405), name
        assert worker.http.put(path, content=b"x").status_code in (404, 405), name
    assert sorted(Path(site.settings.home).rglob("*")) == before


def test_bytes_that_are_not_those_of_the_digest_are_not_stored(site: GatewaySite) -> None:
    worker = site.join()
    held = worker.held()
    digest = hashlib.sha256(b"good").hexdigest()
    assert worker.put(held, b"bad", digest) == 422
    with pytest.raises(KeyError):
        site.artifacts.get(digest)
    site.artifacts.put(b"good")
    assert worker.put(held, b"bad", digest) == 422
    assert site.artifacts.get(digest) == b"good"


def test_a_worker_has_its_share_of_the_store(
    site: GatewaySite, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(server, "_CHUNK_BYTES", 3 * MIB)
    worker = site.join()
    held = worker.held()
    assert [worker.put(held, bytes([n]) * MIB) for n in range(5)] == [204, 204, 204, 413, 413]
    assert worker.report(held, held.report()) == 204


# -- who is who


def test_a_server_with_another_key_hears_nothing(site: GatewaySite) -> None:
    """The pin is verified before anything is sent."""
    heard: list[bytes] = []
    with socket.create_server(("127.0.0.1", 0)) as listener:

        def pose() -> None:
            connection, _ = listener.accept()
            with server_context("77" * 32).wrap_socket(connection, server_side=True) as tls:
                tls.settimeout(10)
                try:
                    heard.append(tls.recv(10_000))
                except OSError:
                    heard.append(b"")

        thread = threading.Thread(target=pose)
        thread.start()
        token = site.token().at(f"https://127.0.0.1:{listener.getsockname()[1]}")
        with pytest.raises(ServiceError, match="its key is another one"):
            join(token, "compile", COMPILES)
        thread.join(20)
    assert heard == [b""]
    with reading(site.engine) as connection:
        assert connection.execute(sa.select(TokenRow.used_at)).scalar_one() is None


def test_the_pin_alone_says_who_a_gateway_is(site: GatewaySite) -> None:
    token = site.token()
    other = JoinToken(type(token.gateway)(token.gateway.url, "0" * 64), token.id, token.secret)
    with pytest.raises(ServiceError, match="its key is another one"):
        join(other, "compile", COMPILES)
    assert join(token, "compile", COMPILES)


def test_a_stranger_gets_nothing(site: GatewaySite) -> None:
    worker = site.join()
    names = {"name": worker.name, "secret": worker.credentials.secret}
    bearers = (
        *("", "Bearer", "Bearer x", "Bearer {name}.", "Bearer {name}.x", "Basic {name}.{secret}"),
        *("Bearer {name}.{secret}x", "Bearer a.{secret}", "Bearer {name}\x00.{secret}"),
        "Bearer " + "a" * 9000,
    )
    paths = [("POST", path) for path in ("/next", "/renew", "/leave/1")]
    lease = f"/leases/1/{new_id()}"
    paths += [("POST", f"{lease}/report"), ("POST", f"{lease}/return"), ("DELETE", lease)]
    paths += [(verb, f"{lease}/artifacts/{'0' * 64}") for verb in ("GET", "PUT")]
    paths += [("GET", f"{lease}/elsewhere")]
    for bearer, (verb, path) in itertools.product(bearers, paths):
        with raw(site) as line:
            head = f"{verb} /v1{path} HTTP/1.1\r\nHost: x\r\nConnection: close\r\n"
            given = f"Content-Length: 0\r\nAuthorization: {bearer.format(**names)}\r\n\r\n"
            line.sendall(f"{head}{given}".encode())
            assert line.recv(1000).split()[1] in (b"401", b"400"), (bearer, verb, path)


def test_nobody_speaks_plain_http_or_an_older_tls(site: GatewaySite) -> None:
    with pytest.raises(httpx.HTTPError):
        httpx.post(site.url.replace("https", "http") + "/v1/join", content=b"{}")
    context = pinned_context(pin_of_secret(site.tls_secret))
    context.minimum_version = ssl.TLSVersion.TLSv1_2
    context.maximum_version = ssl.TLSVersion.TLSv1_2
    with pytest.raises(httpx.HTTPError):
        httpx.post(f"{site.url}/v1/join", content=b"{}", verify=context)


def test_the_database_has_digests_of_secrets_alone(site: GatewaySite) -> None:
    token = site.token()
    joined = join(token, "compile", COMPILES)
    path = Path(site.settings.home)
    for file in (path / "tuna.sqlite", path / "tuna.sqlite-wal"):
        data = file.read_bytes() if file.exists() else b""
        assert token.secret.encode() not in data
        assert joined.secret.encode() not in data


# -- revocation


@pytest.mark.parametrize("doing", ["waits for a chunk", "sends a body", "works"])
def test_a_revoked_worker_is_out_within_two_seconds_whatever_it_does(
    site: GatewaySite, doing: str, type_in: Callable[..., Ended]
) -> None:
    worker = site.join()
    held = worker.held() if doing != "waits for a chunk" else None
    statuses: list[int] = []
    out_at: list[float] = []

    def act() -> None:
        if doing == "waits for a chunk":
            asked = {"id": new_id(), "process": 1, "wait_s": 20.0}
            statuses.append(worker.post("/next", asked).status_code)
        elif doing == "sends a body":

            def slowly() -> Iterator[bytes]:
                for _ in range(12):
                    time.sleep(0.15)
                    yield b"x"

            digest = hashlib.sha256(b"x" * 12).hexdigest()
            path = worker.path(held, f"/artifacts/{digest}")
            statuses.append(worker.http.put(path, content=slowly()).status_code)
        else:
            deadline = time.monotonic() + 30
            while time.monotonic() < deadline:
                status = worker.report(held, held.report("results"))
                if status != 204:
                    statuses.append(status)
                    break
        out_at.append(time.monotonic())

    thread = threading.Thread(target=act)
    thread.start()
    time.sleep(0.3)
    assert type_in("tuna", "workers", "revoke", worker.name).code == 0
    revoked_at = time.monotonic()
    thread.join(40)
    assert statuses[0] in (401, 409)
    # two seconds, and what a busy machine adds: what it does would go on for 20 and 30
    assert out_at[0] - revoked_at < 15.0
    time.sleep(max(0.0, revoked_at + 2.0 - time.monotonic()))
    assert worker.renew().status_code == 401
    if held is not None:
        assert held.chunk.id in site.leases.expired(), "its lease has ended"
        assert worker.report(held, held.report()) == 401
    with pytest.raises(KeyError):
        site.artifacts.get(hashlib.sha256(b"x" * 12).hexdigest())


def test_another_does_the_work_of_a_revoked_worker(
    site: GatewaySite, type_in: Callable[..., Ended]
) -> None:
    victim = site.join()
    held = victim.held()
    assert type_in("tuna", "workers", "revoke", victim.name).code == 0
    site.turn()
    heir, measurer = site.join(), site.join("eval")
    deadline = time.monotonic() + 60
    while not site.is_done():
        assert time.monotonic() < deadline
        site.turn()
        heir.work()
        measurer.work()
    assert victim.report(held, held.report()) in (401, 409)
    assert site.each_once()
    assert type_in("tuna", "workers", "revoke", victim.name).code == 2, "it is final"
    assert type_in("tuna", "workers", "uncordon", victim.name).code == 2


def test_with_a_dead_redis_a_revoked_worker_has_no_access_either(
    site: GatewaySite,
    type_in: Callable[..., Ended],
    monkeypatch: pytest.MonkeyPatch,
    eventually: Eventually,
) -> None:
    worker = site.join()
    with monkeypatch.context() as its:
        its.setenv("TUNA_BROKER_URL", "redis://127.0.0.1:9/0")
        its.setenv("TUNA_REDIS_URL", "redis://127.0.0.1:9/0")
        get_settings.cache_clear()
        said = type_in("tuna", "workers", "revoke", worker.name)
        assert said.code == 5
        assert "no access any more" in said.err
    get_settings.cache_clear()
    eventually(lambda: worker.renew().status_code == 401, 60)


def test_a_token_may_not_be_used_after_its_worker_was_revoked(
    site: GatewaySite, type_in: Callable[..., Ended]
) -> None:
    token = site.token()
    joined = join(token, "compile", COMPILES)
    type_in("tuna", "workers", "revoke", joined.name)
    with pytest.raises(BadInput, match="used before"):
        join(token, "compile", COMPILES)
