"""A member reaches its own keys with a few commands, no script among them: Celery's worker, its
chunks, its artifacts."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
import redis
from billiard.exceptions import WorkerLostError
from guarded_redis import emptied, guarded_redis
from processes import Processes

from tuna.artifacts.signatures import Keys
from tuna.artifacts.store import ArtifactRefused
from tuna.libraries.context import RunContext
from tuna.libraries.items import WorkItem
from tuna.libraries.registry import get_library
from tuna.membership.member import Member, leases_of
from tuna.queue import keys
from tuna.queue.announcements import artifact_keys, control_key
from tuna.queue.connection import make_celery, queue_depth
from tuna.queue.heartbeat import WorkerStatus
from tuna.queue.leases import Leases
from tuna.queue.messages import Chunk, Report, ReportKind, task_message
from tuna.settings import Settings, get_settings
from tuna.workers.runner import Runner
from tuna.workers.worker import Worker

NAME = "eval-box-1"
PREFIX = keys.prefix("n", NAME)
SIGNER = Keys.of_secret("5" * 64)
HOME = get_library("noop").environment()


@pytest.fixture(scope="module")
def url() -> Iterator[str]:
    with guarded_redis() as found:
        yield found


@pytest.fixture()
def admin(url: str) -> redis.Redis:
    """The owner of a Redis with a member's user."""
    client = emptied(url)
    rules = [
        *(f"~{key}" for key in keys.all_keys("n", NAME)),
        "-@all",
        *(f"+{name}" for name in keys.COMMANDS.split()),
    ]
    client.execute_command(
        "ACL SETUSER", "member", "reset", "on", ">secret", "resetchannels", *rules
    )
    client.set(PREFIX + "public", SIGNER.verifier.to_json())
    client.execute_command("ACL LOG", "RESET")
    return client


@pytest.fixture()
def settings(
    admin: redis.Redis, url: str, tuna_home: Path, monkeypatch: pytest.MonkeyPatch
) -> Settings:
    """The settings of the member."""
    monkeypatch.setenv("TUNA_BROKER_URL", url.replace("redis://", "redis://member:secret@"))
    monkeypatch.setenv("TUNA_NAMESPACE", "n")
    monkeypatch.setenv("TUNA_WORKER_NAME", NAME)
    get_settings.cache_clear()
    return get_settings()


@pytest.fixture()
def client(settings: Settings) -> redis.Redis:
    assert settings.broker_url
    found: redis.Redis = redis.Redis.from_url(settings.broker_url.get_secret_value())
    return found


@pytest.fixture()
def processes(settings: Settings, tuna_home: Path, tuna_forks: object) -> Iterator[Processes]:
    made = Processes(tuna_home, tuna_forks)  # type: ignore[arg-type]
    yield made
    made.kill_all()


def deal(admin: redis.Redis, number: int) -> Chunk:
    """Mark a chunk as dealt."""
    item = WorkItem(
        job_id=number,
        attempt=1,
        session_id=1,
        library="noop",
        step="measure",
        solver="Noop1",
        config={},
    )
    facts = {
        "library": "noop",
        "step": item.step,
        "environment": HOME.machine_key,
        "toolchain": HOME.toolchain,
    }
    chunk = Chunk(id=f"c{number}", namespace="n", items=(item,), **facts)
    admin.hset(PREFIX + "dealt", chunk.id, "")
    return chunk


def reports(admin: redis.Redis) -> list[Report]:
    return [
        Report.model_validate_json(fields[b"r"]) for _, fields in admin.xrange(PREFIX + "reports")
    ]


def refusals(admin: redis.Redis) -> list[str]:
    """What Redis refused the member: a command, or a key. That redis-py may not say its version
    does no harm."""
    found = {f"{entry['reason']}: {entry['object']}" for entry in admin.acl_log()}
    return sorted(found - {"command: client", "command: client|setinfo"})


def test_a_worker_of_celery_needs_its_own_keys_and_no_script(
    admin: redis.Redis,
    settings: Settings,
    processes: Processes,
    eventually: Callable[..., None],
    tuna_home: Path,
) -> None:
    worker = processes.start("tuna", "worker", "eval")
    with make_celery(settings).producer_or_acquire() as producer:
        app = make_celery(settings)
        for number in (1, 2):
            message = task_message(deal(admin, number))
            app.send_task(
                "tuna.run_chunk", kwargs=message, queue=keys.WORK, producer=producer, priority=3
            )
    eventually(
        lambda: [report.kind for report in reports(admin)].count(ReportKind.FINISHED) == 2, 30
    )
    assert [(one.kind, one.chunk) for one in reports(admin)] == [
        (kind, chunk)
        for chunk in ("c1", "c2")
        for kind in (ReportKind.STARTED, ReportKind.FINISHED)
    ]
    assert {one.worker.partition(":")[0] for one in reports(admin)} == {NAME}
    (text,) = admin.hvals(PREFIX + "heartbeats")
    status = WorkerStatus.from_json(text)
    assert f"eval.{HOME.machine_key}" in status.queues, "what it serves, not what it takes from"
    admin.set(control_key("n", NAME), "draining")
    assert worker.wait(30) == 0
    assert not admin.exists(PREFIX + "heartbeats"), "it would be dealt chunks until they expire"
    assert refusals(admin) == []
    written = {key.decode() for key in admin.keys("*")}
    assert written <= set(keys.all_keys("n", NAME))
    assert admin.hgetall(PREFIX + "dealt") == {}
    assert "Traceback" not in (tuna_home / "log").read_text()


def test_a_chunk_is_taken_once_reported_and_withdrawn(
    admin: redis.Redis, settings: Settings, client: redis.Redis
) -> None:
    leases = leases_of(client, settings, "n")
    assert not leases.take("c1", "t", "early"), "it was not dealt"
    deal(admin, 1)
    assert leases.take("c1", "t", "one")
    assert leases.take("c1", "t", "one"), "a retry: the answer was lost with the connection"
    assert not leases.take("c1", "another", "two")
    assert leases.renew("c1", "t")
    assert leases.report("c1", "t", "three")
    assert not leases.report("c1", "another", "four")
    admin.hdel(PREFIX + "dealt", "c1")
    assert not leases.renew("c1", "t")
    assert not leases.report("c1", "t", "late")
    assert not leases.finish("c1", "t", "late")
    assert not leases.return_chunk("c1", "late")
    assert [fields[b"r"] for _, fields in admin.xrange(PREFIX + "reports")] == [
        b"one",
        b"one",
        b"three",
    ]
    assert refusals(admin) == []


def test_an_end_is_reported_once(
    admin: redis.Redis, settings: Settings, client: redis.Redis
) -> None:
    leases = leases_of(client, settings, "n")
    for number in (1, 2, 3):
        deal(admin, number)
        assert leases.take(
            f"c{number}",
            "t",
            Report(kind=ReportKind.STARTED, chunk="c", worker="w").to_json().decode(),
        )
    end = Report(kind=ReportKind.FINISHED, chunk="c1", worker="w").to_json().decode()
    assert leases.finish("c1", "t", end)
    assert not leases.return_chunk("c1", end)
    assert leases.return_chunk("c2", end)
    leases.forfeit("c3")
    leases.forfeit("c3")
    last = reports(admin)[-1]
    assert (last.kind, last.chunk, last.worker) == (ReportKind.LOST, "c3", f"{NAME}:{os.getpid()}")
    assert len(reports(admin)) == 6
    assert refusals(admin) == []


def test_a_chunk_that_is_given_up_is_reported_as_soon_as_redis_listens(
    admin: redis.Redis, settings: Settings, client: redis.Redis
) -> None:
    """A coordinator holds the lease while this process has a heartbeat: it cannot expire by
    itself."""
    member = Member(client, settings)
    for number in (1, 2, 3):
        deal(admin, number)
        assert member.leases.take(f"c{number}", "t", "begun")
    assert member.leases.finish("c1", "t", "done")
    admin.hdel(PREFIX + "dealt", "c2")
    admin.execute_command("ACL SETUSER", "member", "off")  # as after a restart of Redis
    admin.client_kill_filter(user="member")
    for number in (1, 2, 3):
        member.leases.give_up(f"c{number}")
    admin.execute_command("ACL SETUSER", "member", "on")
    here = WorkerStatus(f"{NAME}:1", "eval", "h", 1, "", "", (), (), 1.0, 1.0)
    member.board.announce(here)
    member.board.announce(here)
    texts = [fields[b"r"] for _, fields in admin.xrange(PREFIX + "reports")]
    assert texts[:-1] == [b"begun", b"begun", b"begun", b"done"], "c1 was ended, and c2 withdrawn"
    last = Report.model_validate_json(texts[-1])
    assert (last.kind, last.chunk) == (ReportKind.LOST, "c3")


def test_the_chunk_of_a_process_that_died_while_redis_was_away_is_reported_when_it_is_back(
    admin: redis.Redis, settings: Settings, client: redis.Redis, eventually: Callable[..., None]
) -> None:
    """A coordinator held its lease, since the worker's other processes had heartbeats, until the
    chunk's time limit."""
    worker = Worker(make_celery(settings), settings)
    chunk = deal(admin, 1)
    assert leases_of(client, settings, "n").take(
        chunk.id, "t", Report(kind=ReportKind.STARTED, chunk="c1", worker="w").to_json().decode()
    )
    admin.execute_command("ACL SETUSER", "member", "off")  # as after a restart of Redis
    admin.client_kill_filter(user="member")
    worker._free_lease_of_dead_process(kwargs=task_message(chunk), exception=WorkerLostError())
    admin.execute_command("ACL SETUSER", "member", "on")
    eventually(lambda: reports(admin)[-1].kind is ReportKind.LOST, 20)
    assert [(one.kind, one.chunk) for one in reports(admin)][1:] == [(ReportKind.LOST, "c1")]


def test_a_job_that_failed_here_is_done_without_a_look_at_other_workers(
    admin: redis.Redis, settings: Settings, client: redis.Redis, tmp_path: Path
) -> None:
    """A coordinator, which sees them all, would not have dealt it; the server would note that they
    were asked for."""
    member = Member(client, settings)
    chunk = deal(admin, 1)
    items = tuple(item.model_copy(update={"avoid": NAME}) for item in chunk.items)
    runner = Runner(client, 10.0, RunContext(member.store, tmp_path, (0,)), NAME, member=member)
    assert runner.run(chunk.model_copy(update={"items": items}), get_library("noop")) == "finished"
    assert refusals(admin) == []


def test_artifacts_lie_beside_their_chunk(
    admin: redis.Redis, settings: Settings, client: redis.Redis
) -> None:
    member = Member(client, settings)
    member.store.keys = artifact_keys(client, settings, "n")
    store = member.artifacts("c1")
    digest = store.put(b"code")
    assert admin.hgetall(PREFIX + "artifacts") == {f"c1/{digest}".encode(): b"code"}, (
        "a member does not sign"
    )
    with pytest.raises(ArtifactRefused):
        store.get(digest)
    admin.hset(PREFIX + "artifacts", f"c1/{digest}.{SIGNER.ids[0]}", SIGNER.sign(digest))
    assert store.get(digest) == b"code"
    other = "0" * 64
    for value in (None, b"not what it says"):
        if value:
            admin.hset(PREFIX + "artifacts", f"c2/{other}", value)
        with pytest.raises(KeyError):
            member.artifacts("c2").get(other)
    store.remove([digest])
    assert not admin.hexists(PREFIX + "artifacts", f"c1/{digest}")
    assert refusals(admin) == []


def test_own_workers_have_the_leases_of_all(admin: redis.Redis, tuna_home: Path, url: str) -> None:
    for own in ({}, {"namespace": "n"}, {"worker_name": "box"}):
        assert isinstance(leases_of(admin, Settings(home=tuna_home, **own), "n"), Leases)


def test_what_a_worker_did_not_finish_is_not_put_back(
    admin: redis.Redis, settings: Settings
) -> None:
    """A coordinator deals its chunk again. Kombu would do so under a lock that a script releases,
    and from keys of its own."""
    app = make_celery(settings)
    app.select_queues([keys.WORK])
    app.send_task("tuna.run_chunk", kwargs=task_message(deal(admin, 1)), queue=keys.WORK)
    with app.connection_for_read() as connection:
        assert queue_depth(connection, keys.WORK) == 1
        held: list[object] = []
        consumer = app.amqp.TaskConsumer(connection, on_message=held.append)
        with consumer:
            connection.drain_events(timeout=5)
            assert len(held) == 1
            consumer.channel.qos.restore_visible()
        consumer.channel.close()
        assert queue_depth(connection, keys.WORK) == 0
    bindings = {key.encode() for key in keys.all_keys("n", NAME) if "binding" in key}
    assert set(admin.keys("*")) - bindings == {
        f"{PREFIX}dealt".encode(),
        f"{PREFIX}public".encode(),
    }
    assert refusals(admin) == []
