"""What a gateway offers: joins, chunks, renewals, reports, artifacts, and orders."""

from __future__ import annotations

import hashlib
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import redis
import sqlalchemy as sa
from command_lines import Ended
from gateway_site import COMPILES, HOME, MEASURES, GatewaySite, RemoteDouble, link_of, run_next
from jobs_builder import accepted, states

from tuna.db.engine import writing
from tuna.db.models import TokenRow, WorkerRow
from tuna.db.types import utc_now
from tuna.errors import BadInput, ServiceError
from tuna.queue.leases import new_id
from tuna.queue.messages import ReportKind
from tuna.workers.link import Elsewhere
from tuna_remote.gateway import https_client, remote_link
from tuna_remote.gateway.https_client import AccessLost, JoinRefused, NoSession, join

Eventually = Callable[[Callable[[], object], float], None]


def test_remote_workers_do_all_the_work_once(site: GatewaySite) -> None:
    compiler, measurer = site.join(), site.join("eval")
    while not site.is_done():
        site.turn()
        compiler.work()
        measurer.work()
    assert site.each_once()
    assert site.failures() == []
    reports = {report.remote for report in site.results()}
    assert reports <= {compiler.name, measurer.name}


def test_the_runner_of_all_workers_runs_by_https_alone(site: GatewaySite, tmp_path: Path) -> None:
    doubles = site.join(), site.join("eval")
    links = [link_of(one.credentials, tmp_path / one.name).start() for one in doubles]
    try:
        while not site.is_done():
            site.turn()
            for link in links:
                while outcome := run_next(link, tmp_path):
                    assert outcome == "finished"
    finally:
        for link in links:
            link.close()
    assert site.each_once()


def test_a_token_lets_one_worker_in_once(site: GatewaySite) -> None:
    token = site.token()
    first = join(token, "compile", COMPILES)
    assert site.worker(first.name).toolchains == (HOME.toolchain,)
    with pytest.raises(BadInput, match="used before"):
        join(token, "compile", COMPILES)


def test_a_join_whose_answer_was_lost_can_be_repeated(
    site: GatewaySite, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(https_client.secrets, "token_urlsafe", lambda _: "s" * 43)
    token = site.token()
    assert join(token, "compile", COMPILES).name == join(token, "compile", COMPILES).name


def test_two_with_the_same_token_at_once_make_one_worker(site: GatewaySite) -> None:
    token, joined, refused = site.token(), [], []

    def ask() -> None:
        try:
            joined.append(join(token, "compile", COMPILES))
        except BadInput as error:
            refused.append(error)

    threads = [threading.Thread(target=ask) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert (len(joined), len(refused)) == (1, 3)


def test_a_token_that_is_not_open_is_refused(
    site: GatewaySite, type_in: Callable[..., Ended]
) -> None:
    token, revoked = site.token(), site.token()
    assert type_in("tuna", "token", "revoke", revoked.id).code == 0
    unknown = https_client.JoinToken(token.gateway, "0" * 12, token.secret)
    wrong = https_client.JoinToken(token.gateway, token.id, "x" * 32)
    for one in (revoked, unknown, wrong, token):
        if one is token:
            with writing(site.engine) as connection:
                connection.execute(sa.update(TokenRow).values(expires_at=utc_now()))
        with pytest.raises(BadInput, match="unknown, was used before, or has expired"):
            join(one, "compile", COMPILES)


def test_the_wrong_role_and_environment_are_refused_and_the_token_stays_good(
    site: GatewaySite,
) -> None:
    token = site.token("eval")
    with pytest.raises(JoinRefused, match="for eval workers"):
        join(token, "compile", COMPILES)
    with pytest.raises(NoSession):
        join(token, "eval", MEASURES.model_copy(update={"environments": ("0" * 16,)}))
    assert join(token, "eval", MEASURES)
    with pytest.raises(JoinRefused, match="no session needs a toolchain"):
        join(site.token(), "compile", COMPILES.model_copy(update={"toolchains": ("other",)}))


def test_a_worker_gets_chunks_of_what_it_was_admitted_to_alone(site: GatewaySite) -> None:
    measurer = site.join("eval")
    site.turn()
    assert measurer.next() is None, "only compile work waits"
    assert site.join().next() is not None


def test_a_waiting_worker_gets_a_chunk_that_is_published_meanwhile(site: GatewaySite) -> None:
    compiler, found = site.join(), []
    waits = threading.Thread(target=lambda: found.append(compiler.next(wait_s=20.0)))
    began_at = time.monotonic()
    waits.start()
    time.sleep(0.3)
    site.publish()
    waits.join()
    assert found[0] is not None
    assert time.monotonic() - began_at < 15


def test_a_worker_learns_whether_jobs_are_to_come(site: GatewaySite, tmp_path: Path) -> None:
    """A worker that leaves when nothing is to be done waits while the coordinator has jobs."""
    worker = site.join()
    link = link_of(worker.credentials, tmp_path / "home")
    assert link.next(new_id(), 0.0) is None
    assert link.is_idle
    site.coordinator._announce_open()
    assert link.next(new_id(), 0.0) is None
    assert not link.is_idle
    site.publish()
    assert link.next(new_id(), 5.0) is not None
    assert not link.is_idle


def test_the_same_request_finds_the_same_chunk(site: GatewaySite) -> None:
    """A gateway that was killed after it leased a chunk."""
    compiler, lease = site.join(processes=2), new_id()
    site.publish()
    first = compiler.next(lease=lease)
    with site.serving():
        again = RemoteDouble(site, compiler.credentials).next(lease=lease)
    assert first is not None
    assert again is not None
    assert first.chunk == again.chunk
    assert len(site.results()) == 1, "it is reported as begun once"


def test_a_worker_has_a_chunk_for_each_process_and_as_many_ahead(site: GatewaySite) -> None:
    compiler = site.join(processes=2)
    site.coordinator.publisher._settings = site.settings.model_copy(update={"claim_batch": 2})
    for _ in range(4):
        site.publish()
    held = [compiler.next() for _ in range(5)]
    there = [one for one in held if one is not None]
    assert [one.begun for one in there][:2] == [True, True]
    assert not any(one.begun for one in there[2:])
    assert len(there) <= 4


def test_a_chunk_that_was_not_begun_costs_no_attempt(site: GatewaySite) -> None:
    site.coordinator.publisher._settings = site.settings.model_copy(update={"claim_batch": 5})
    compiler = site.join()
    site.publish()
    site.publish()
    held = [one for one in (compiler.next(), compiler.next()) if one is not None]
    assert [one.begun for one in held] == [True, False]
    site.leases.evict(compiler.name)
    site.turn()
    assert site.failures() == ["worker_lost"], "of the one that was begun, its first job"


def test_a_worker_that_died_is_charged_and_its_chunk_repeated(site: GatewaySite) -> None:
    compiler = site.join()
    held = compiler.held()
    assert compiler.http.delete(compiler.path(held)).status_code == 204
    site.turn()
    assert site.failures() == ["worker_lost"]
    assert compiler.report(held, held.report()) == 409
    while not site.is_done():
        site.turn()
        compiler.work()
        if states(site.engine).get("eval_queued"):
            break
    assert {count for *_, count in accepted(site.engine)} == {1}


def test_what_is_returned_is_repeated_uncharged_after_a_pause(site: GatewaySite) -> None:
    compiler, heir = site.join(), site.join()
    held = compiler.held()
    assert compiler.post(compiler.path(held, "/return")).status_code == 204
    site.turn()
    site.publish()
    assert site.failures() == []
    held = heir.next(wait_s=10.0)
    assert held is not None
    assert heir.report(held, held.report("returned", reason="a full disk")) == 204
    site.turn()
    site.publish()
    assert heir.next() is None, "who returns work does not get more at once"
    assert compiler.next(wait_s=10.0) is not None


def test_a_canceled_chunk_is_lost_with_the_next_renewal(site: GatewaySite) -> None:
    compiler = site.join()
    held = compiler.held()
    assert compiler.renew(held).json() == {"state": "active", "lost": []}
    assert compiler.put(held, b"code") == 204
    site.leases.drop([held.chunk.id])
    assert compiler.renew(held).json()["lost"] == [held.lease]
    assert compiler.report(held, held.report()) == 409
    left, jobs = site.results()[-1], sorted(item.job_id for item in held.chunk.items)
    assert (left.kind, list(left.jobs)) == (ReportKind.ABANDONED, jobs)
    assert left.artifacts == (hashlib.sha256(b"code").hexdigest(),), "for the drain to remove"


def test_a_remote_worker_names_nothing_that_is_to_be_removed(site: GatewaySite) -> None:
    compiler = site.join()
    held = compiler.held()
    before = len(site.results())
    claims: tuple[dict[str, Any], ...] = (
        {"kind": "abandoned"},
        {"jobs": (1,)},
        {"artifacts": ("0",)},
    )
    for facts in claims:
        assert compiler.report(held, held.report(**{"kind": "results", **facts})) == 422, facts
    assert len(site.results()) == before


def test_a_chunk_is_not_renewed_beyond_its_time_limit(
    site: GatewaySite, monkeypatch: pytest.MonkeyPatch
) -> None:
    compiler = site.join()
    held = compiler.held()
    late = time.time() + 1e6
    monkeypatch.setattr("tuna_remote.gateway.handout.time.time", lambda: late)
    assert compiler.renew(held).json()["lost"] == [held.lease]
    monkeypatch.undo()
    site.turn()
    assert site.failures() == ["worker_lost"]


@pytest.mark.parametrize("order", ["cordon", "drain"])
def test_orders_come_with_the_next_renewal(
    site: GatewaySite, order: str, type_in: Callable[..., Ended], eventually: Eventually
) -> None:
    compiler = site.join()
    site.publish()
    assert type_in("tuna", "workers", order, compiler.name).code == 0
    state = {"cordon": "cordoned", "drain": "draining"}[order]
    eventually(lambda: compiler.renew().json()["state"] == state, 60)
    assert compiler.next() is None
    assert type_in("tuna", "workers", "uncordon", compiler.name).code == 0
    eventually(lambda: compiler.next() is not None, 60)


def test_heartbeats_are_shown_under_the_workers_name_with_what_it_was_admitted_to(
    site: GatewaySite, type_in: Callable[..., Ended]
) -> None:
    compiler = site.join()
    answer = compiler.renew(
        environment="0" * 16,
        toolchains=[HOME.toolchain, "another"],
        job_ids=[1, 2],
        place="another/cpu0",
        waits_for="another process's measurement on cpu1",
        name="own:1",
    )
    assert answer.status_code == 200
    (status,) = site.board.live()
    assert (status.name, status.host, status.place) == (
        f"{compiler.name}:1",
        COMPILES.host,
        compiler.name,
    )
    assert (status.environment, status.toolchains, status.job_ids) == (
        "",
        (HOME.toolchain,),
        (1, 2),
    )
    assert status.waits_for == "another process's measurement on cpu1"
    assert compiler.name in type_in("tuna", "workers").out
    assert compiler.post("/leave/1").status_code == 204
    assert site.board.live() == []


def test_artifacts_are_signed_here_and_read_by_those_who_hold_the_chunk(site: GatewaySite) -> None:
    compiler, other = site.join(), site.join()
    held = compiler.held()
    assert compiler.put(held, b"code") == 204
    digest = site.artifacts.put(b"code")
    assert site.artifacts.get(digest) == b"code", "signed"
    assert compiler.get(held, digest).content == b"code"
    assert other.http.get(compiler.path(held, f"/artifacts/{digest}")).status_code == 409
    secret = site.artifacts.put(b"of others")
    assert compiler.get(held, secret).status_code == 404


def test_a_result_whose_artifact_is_not_there_has_failed(site: GatewaySite) -> None:
    compiler = site.join()
    held = compiler.held()
    others = site.artifacts.put(b"of others")
    compiler.put(held, b"mine")
    mine = site.artifacts.put(b"mine")
    results = held.results(artifact=others)[:1] + held.results(artifact=mine)[1:]
    assert compiler.report(held, held.report(results=results)) == 204
    site.coordinator.drain.once()
    assert site.failures() == ["infra"]


def test_a_worker_that_is_silent_for_an_hour_has_no_access(
    site: GatewaySite, type_in: Callable[..., Ended], eventually: Eventually
) -> None:
    compiler = site.join()
    with writing(site.engine) as connection:
        past = utc_now().replace(year=2020)
        connection.execute(sa.update(WorkerRow).values(seen_at=past))
    eventually(lambda: compiler.renew().status_code == 401, 60)
    assert "gone" in type_in("tuna", "workers").out


def test_the_runner_learns_whether_others_could_do_the_work(
    site: GatewaySite, tmp_path: Path
) -> None:
    compiler, other = site.join(), site.join()
    site.publish()
    link = link_of(compiler.credentials, tmp_path)
    handed = link.next(new_id(), 0.0)
    assert handed is not None
    chunk = remote_link.Chunk.model_validate_json(handed.chunk)
    assert link.elsewhere(chunk, compiler.name) == Elsewhere(others=False, succeeds=False)
    other.renew(place=other.name, done=3)
    assert link.elsewhere(chunk, compiler.name) == Elsewhere(others=True, succeeds=True)
    link.client.close()


def test_an_outage_of_redis_is_503_and_the_client_waits(
    site: GatewaySite, monkeypatch: pytest.MonkeyPatch
) -> None:
    compiler = site.join()
    site.publish()

    def away(*_: object, **__: object) -> None:
        raise redis.ConnectionError("away")

    monkeypatch.setattr("tuna_remote.gateway.handout.Handout.hand", away)
    assert compiler.post("/next", {"id": new_id(), "process": 1, "wait_s": 0}).status_code == 503
    monkeypatch.undo()
    assert compiler.next() is not None


def test_without_a_gateway_a_worker_gives_up_in_time(site: GatewaySite) -> None:
    token = site.token().at("https://127.0.0.1:9")
    with pytest.raises(ServiceError, match="does not answer"):
        join(token, "compile", COMPILES, timeout_s=0.5)


def test_a_revoked_link_says_so(
    site: GatewaySite, tmp_path: Path, type_in: Callable[..., Ended], eventually: Eventually
) -> None:
    compiler, told = site.join(), []
    link = link_of(compiler.credentials, tmp_path)
    link._on_state = told.append
    link.start()
    assert type_in("tuna", "workers", "revoke", compiler.name).code == 0
    eventually(lambda: told == ["revoked"], 60)
    with pytest.raises(AccessLost):
        link.next(new_id(), 0.0)
    link.close()


def test_half_a_record_of_a_gateway_that_was_killed_stops_nobody(site: GatewaySite) -> None:
    worker, lease = site.join(), new_id()
    site.publish()
    record = f"tuna:{{{site.namespace}}}:handed:{worker.name}:{worker.process}/{lease}"
    site.client.hset(record, "chunk", "another")
    held = worker.next(lease=lease)
    assert held is not None
    assert held.chunk.id != "another"
    assert worker.report(held, held.report()) == 204
    assert not site.client.exists(record)
