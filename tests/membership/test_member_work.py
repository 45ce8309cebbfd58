"""A coordinator deals to members, takes their reports, and holds their leases."""

from __future__ import annotations

import hashlib
import time
from collections.abc import Iterator
from pathlib import Path

import pytest
import redis
import sqlalchemy as sa
from jobs_builder import accepted, states
from member_double import MemberDouble, good
from member_room import LIBRARY
from member_room import Room as Plain
from redis.client import Pipeline
from shared_data import needed_program

from tuna.db.engine import reading, writing
from tuna.db.models import Job, StepResult, Trial
from tuna.libraries.items import Trial as TrialResult
from tuna.membership import dealer, member_work
from tuna.membership import members as store
from tuna.queue.heartbeat import HeartbeatBoard
from tuna.queue.messages import ReportKind
from tuna.settings import get_settings
from tuna.testing.servers import free_port, rabbitmq_server
from tuna.vocabulary import Cause

LEASE_S = 4.0


class Room(Plain):
    """With a member."""

    first: MemberDouble


@pytest.fixture()
def room(
    sqlite_engine: sa.Engine,
    redis_client: redis.Redis,
    redis_urls: dict[str, str],
    tuna_home: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> Iterator[Room]:
    for name, value in {**redis_urls, "TUNA_LEASE_S": str(LEASE_S)}.items():
        monkeypatch.setenv(name, value)
    get_settings.cache_clear()
    made = Room(sqlite_engine, redis_client, 20)
    made.first = made.member("m1")
    yield made
    made.coordinator._members.close()
    for user in redis_client.acl_users():
        if user != "default":
            redis_client.acl_deluser(user)


def test_a_member_has_a_chunk_for_each_process_and_one_more_and_its_reports_count(
    room: Room,
) -> None:
    room.turn()
    dealt = room.client.hgetall(room.first.key("dealt"))
    assert len(dealt) == 2
    assert set(dealt.values()) == {b""}
    assert {room.client.hget(room.leases.holders_key, chunk).split(b"/")[0] for chunk in dealt} == {
        b"m1:dealt"
    }
    chunk = room.first.next_chunk()
    room.first.report(ReportKind.STARTED, chunk.id, worker="somebody:9", place="elsewhere")
    room.turn()
    assert states(room.engine)["compiling"] == len(chunk.items)
    room.first.report(ReportKind.RESULTS, chunk.id, [good(chunk.items[0])], worker="somebody:9")
    rest = [good(item) for item in chunk.items[1:]]
    room.first.report(ReportKind.FINISHED, chunk.id, rest, worker="x:y:z")
    room.turn()
    with reading(room.engine) as connection:
        workers = set(connection.execute(sa.select(StepResult.worker)).scalars())
    assert workers == {"m1:9", "m1:0"}
    assert len(accepted(room.engine)) == len(chunk.items)
    assert room.client.hget(room.leases.holders_key, chunk.id) is None
    assert chunk.id.encode() not in room.client.hgetall(room.first.key("dealt"))
    assert len(room.client.hgetall(room.first.key("dealt"))) == 2, "the free place is filled"


def test_short_chunks_are_dealt_for_half_a_second_ahead(
    room: Room, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A coordinator comes by some ten times a second: between its rounds a member with two short
    chunks would wait."""
    pace = room.coordinator._members._pace
    for _ in range(3):
        pace.finish("m1")
    room.turn()
    assert len(room.client.hgetall(room.first.key("dealt"))) == 1 + 3
    for _ in range(100):
        pace.finish("m1")
    assert pace.ahead("m1") == dealer.MOST_AHEAD
    monkeypatch.setattr(dealer, "_AHEAD_S", 0.0)
    assert pace.ahead("m1") == 1


def test_all_is_done_once_with_two_coordinators(room: Room) -> None:
    other = room.another()
    others = room.member("m2", "eval")
    deadline = time.monotonic() + 30
    while states(room.engine) != {"evaluated": 200}:
        assert time.monotonic() < deadline, states(room.engine)
        for coordinator in (room.coordinator, other):
            room.turn(coordinator)
            room.first.work()
            others.work()
    other._members.close()
    assert {count for *_, count in accepted(room.engine)} == {1}
    assert room.coordinator.drain.counts.refused + other.drain.counts.refused == 0
    assert room.client.hlen(f"tuna:{{{room.namespace}}}:dealt") == 0
    assert room.client.hlen(f"tuna:{{{room.namespace}}}:faults") == 0


def test_one_report_that_two_coordinators_read_is_moved_once(room: Room) -> None:
    room.turn()
    chunk = room.first.next_chunk()
    room.first.report(ReportKind.FINISHED, chunk.id, [good(item) for item in chunk.items])
    other = room.another()._members
    (member,) = other._roster.members()
    read = other._inbox.reports([member])
    assert len(read["m1"]) == 1
    assert room.coordinator._members.collect() == 1
    assert other._collector._collect(member, read["m1"]) == 0
    assert room.client.xlen(room.leases.results_key) == 1
    assert room.state("m1") == "active", "that is nobody's fault"


def test_what_it_makes_is_taken_in_signed_and_what_is_missing_fails(room: Room) -> None:
    room.turn()
    chunk = room.first.next_chunk()
    code = b"machine code"
    names = [
        hashlib.sha256(code).hexdigest(),
        hashlib.sha256(b"never put").hexdigest(),
        "0" * 64,
        "../../etc/passwd",
    ]
    room.first.put(chunk.id, names[0], code)
    room.first.put(chunk.id, names[2], b"not what its name says")
    room.first.put(chunk.id, names[3], b"x")
    results = [
        good(item, trials=(TrialResult(index=0, params="{}", artifact=name),))
        for item, name in zip(chunk.items, names, strict=False)
    ]
    room.first.report(ReportKind.FINISHED, chunk.id, results)
    room.turn()
    assert room.coordinator._artifacts.get(names[0]) == code
    with reading(room.engine) as connection:
        assert (
            connection.execute(sa.select(Trial.artifact).where(Trial.artifact.is_not(None)))
            .scalars()
            .all()
            == names[:1]
        )
    assert room.failures() == [("infra", "m1:7")] * 3
    assert room.client.hlen(room.first.key("artifacts")) == 0, (
        "what was put for a chunk goes with it"
    )


def test_what_a_chunk_needs_is_put_beside_it(room: Room) -> None:
    evaluator = room.member("m2", "eval")
    room.turn()
    chunk = room.first.next_chunk()
    name = hashlib.sha256(b"code").hexdigest()
    room.first.put(chunk.id, name, b"code")
    trial = TrialResult(index=0, params="{}", artifact=name)
    room.first.report(
        ReportKind.FINISHED, chunk.id, [good(item, trials=(trial,)) for item in chunk.items]
    )
    room.turn()
    room.turn()
    measured = evaluator.next_chunk()
    files = evaluator.artifacts(measured.id)
    assert files[name] == b"code"
    assert len(files) == 2, "with a signature"
    evaluator.report(
        ReportKind.FINISHED, measured.id, [good(item, trials=(trial,)) for item in measured.items]
    )
    room.turn()
    assert states(room.engine)["evaluated"] == len(measured.items), "an input need not be put again"
    assert not evaluator.artifacts(measured.id)


def test_a_chunk_that_was_canceled_or_evicted_leaves_the_member_and_is_no_fault_of_its(
    room: Room,
) -> None:
    room.turn()
    first, second = room.first.next_chunk(), room.first.next_chunk()
    room.leases.drop([first.id])
    room.leases.evict("m1")
    # before a coordinator knows of it
    room.first.report(ReportKind.RESULTS, first.id, [good(first.items[0])])
    room.turn()
    assert (
        not {first.id.encode(), second.id.encode()}
        & room.client.hgetall(room.first.key("dealt")).keys()
    )
    for chunk in (first, second):
        room.first.report(ReportKind.FINISHED, chunk.id, [good(item) for item in chunk.items])
    room.turn()
    assert accepted(room.engine) == []
    assert room.client.xlen(room.first.key("reports")) == 0
    assert room.client.hlen(f"tuna:{{{room.namespace}}}:faults") == 0


def test_a_process_that_died_is_charged_and_its_chunk_repeated(room: Room) -> None:
    room.turn()
    chunk = room.first.next_chunk()
    room.first.report(ReportKind.STARTED, chunk.id)
    room.first.report(ReportKind.LOST, chunk.id)
    room.first.report(ReportKind.RESULTS, chunk.id, [good(chunk.items[0])])
    room.turn()
    assert room.failures() == [("worker_lost", "")]
    assert accepted(room.engine) == []


def test_a_silent_member_loses_its_chunks_of_which_only_the_begun_one_is_charged(
    room: Room, monkeypatch: pytest.MonkeyPatch
) -> None:
    room.turn()
    begun = room.first.next_chunk()
    room.first.report(ReportKind.STARTED, begun.id)
    room.turn()
    monkeypatch.setattr(room.coordinator._members._relay, "_ttl_s", 0.0)
    time.sleep(0.01)
    room.turn()
    assert room.client.hlen(room.first.key("dealt")) == 0
    assert len(room.failures()) == 1
    assert room.failures()[0][0] == "worker_lost"


def test_a_chunk_that_was_lost_on_its_way_is_dealt_again_after_a_pause(
    room: Room, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(member_work, "_ARRIVES_WITHIN_S", 0.0)
    room.turn()
    lost = room.first.next_chunk(), room.first.next_chunk()
    room.turn()
    assert not {one.id.encode() for one in lost} & set(room.client.hgetall(room.first.key("dealt")))
    assert room.failures() == [], "nobody is charged"
    assert room.first.next_chunk() is None
    room.coordinator._members._pace._until.clear()
    room.turn()
    assert room.first.work() == 2


def test_a_chunk_that_takes_longer_than_its_limits_is_taken_back(
    room: Room, monkeypatch: pytest.MonkeyPatch
) -> None:
    room.turn()
    chunk = room.first.next_chunk()
    room.first.report(ReportKind.STARTED, chunk.id)
    room.turn()
    dealt = room.coordinator._members._dealt
    now = dealt.now()
    ends = sorted(one.ends_by - now for one in dealt.all().values())
    limits = sum(LIBRARY.time_limit_s(LIBRARY.step("build"), item) for item in chunk.items)
    assert limits < ends[0]
    assert limits * 2 < ends[1], "the second one waits for the first"
    monkeypatch.setattr(dealt, "now", lambda: now + ends[0] + 1)
    room.turn()
    assert [cause for cause, _ in room.failures()] == ["worker_lost"]
    assert chunk.id.encode() not in room.client.hgetall(room.first.key("dealt"))


def test_heartbeats_are_shown_under_the_name_of_their_member_and_with_what_it_was_admitted_to(
    room: Room,
) -> None:
    room.first.beat(
        9,
        name="owner:1",
        role="eval",
        host="owner",
        environment="x",
        toolchains=("other", "noop-1"),
    )
    room.first.beat(10, place="m1/gpu0", job_ids=(1, 2), done=3)
    room.turn()
    live = {one.name: one for one in HeartbeatBoard(room.client, room.namespace, LEASE_S).live()}
    assert live.keys() == {"m1:7", "m1:9", "m1:10"}
    assert (live["m1:9"].role, live["m1:9"].host, live["m1:9"].environment) == ("compile", "h", "")
    assert live["m1:9"].toolchains == ("noop-1",)
    assert [live[f"m1:{pid}"].place for pid in (9, 10)] == ["m1", "m1/gpu0"]
    assert (live["m1:10"].job_ids, live["m1:10"].done) == ((1, 2), 3)


def test_a_cordoned_member_finishes_and_gets_nothing_new(room: Room) -> None:
    room.turn()
    with writing(room.engine) as connection:
        store.cordon(connection, "m1")
    assert room.first.work() == 2
    room.turn()
    assert room.first.next_chunk() is None
    assert accepted(room.engine)


def test_without_members_a_round_costs_no_command(
    sqlite_engine: sa.Engine, redis_client: redis.Redis, room: Room
) -> None:
    with writing(sqlite_engine) as connection:
        store.set_state(connection, "m1", "revoked")
    room.turn()
    before = redis_client.info("commandstats")
    room.coordinator._members.tick()
    after = redis_client.info("commandstats")
    changed = {
        name for name in after if after[name]["calls"] != before.get(name, {"calls": 0})["calls"]
    }
    assert changed <= {"cmdstat_info"}


def test_after_a_stop_of_the_coordinator_a_live_member_keeps_its_chunks(room: Room) -> None:
    room.turn()
    chunk = room.first.next_chunk()
    room.first.report(ReportKind.STARTED, chunk.id)
    room.turn()
    room.client.zadd(room.leases.leases_key, {chunk.id: 1}, xx=True)
    room.first.beat()
    room.turn(room.another())
    assert room.failures() == []
    assert room.client.zscore(room.leases.leases_key, chunk.id) > 1


def test_a_redis_that_forgets_a_script_before_its_run_ends_no_coordinator(
    room: Room, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It was restarted after redis-py had loaded the scripts of a pipeline, which it repeats
    without them."""
    load, forgotten = Pipeline.load_scripts, []

    def load_and_forget(pipe: Pipeline) -> None:
        load(pipe)
        if not forgotten:
            forgotten.append(room.client.script_flush())

    monkeypatch.setattr(Pipeline, "load_scripts", load_and_forget)
    room.coordinator.run(lambda: None, lambda: bool(forgotten))
    assert room.client.hlen(room.first.key("dealt")) == 2


def test_a_job_that_failed_on_a_member_goes_to_another_worker_first(
    room: Room, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("tuna.queue.heartbeat._MIN_INTERVAL_S", 0.0)
    other = room.member("m2")
    room.turn()
    chunk = room.first.next_chunk()
    bad = good(chunk.items[0], cause=Cause.INFRA).model_copy(update={"ok": False})
    room.first.report(
        ReportKind.FINISHED, chunk.id, [bad, *(good(item) for item in chunk.items[1:])]
    )
    room.turn()
    with writing(room.engine) as connection:
        assert connection.execute(sa.select(Job.avoid).where(Job.id == bad.job_id)).scalar() == "m1"
        connection.execute(sa.update(Job).values(ready_at=None))
    done = []
    while chunks := [
        (double, chunk) for double in (room.first, other) if (chunk := double.next_chunk())
    ]:
        for double, chunk in chunks:
            done += [(double.name, item.job_id) for item in chunk.items]
            double.report(ReportKind.FINISHED, chunk.id, [good(item) for item in chunk.items])
        room.turn()
        for double in (room.first, other):
            double.beat()
    assert [name for name, job in done if job == bad.job_id] == ["m2"]


@pytest.mark.drill(only=True)  # RabbitMQ takes seconds to start
def test_chunks_are_dealt_from_another_broker(room: Room, monkeypatch: pytest.MonkeyPatch) -> None:
    needed_program("rabbitmq-server")
    port = free_port()
    with rabbitmq_server("127.0.0.1", port, "tuna", "tuna", "secret"):
        monkeypatch.setenv("TUNA_BROKER_URL", f"amqp://tuna:secret@127.0.0.1:{port}/tuna")
        get_settings.cache_clear()
        room.coordinator = room.another()
        evaluator = room.member("m2", "eval")
        deadline = time.monotonic() + 30
        while not room.is_done():
            assert time.monotonic() < deadline, states(room.engine)
            room.turn()
            room.first.work()
            evaluator.work()
        assert room.each_once()
        assert room.failures() == []
        room.coordinator._members.close()
