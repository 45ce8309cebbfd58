"""Tokens and members, with a real Redis and its access list."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from concurrent import futures
from contextlib import contextmanager, suppress
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import redis
import sqlalchemy as sa
from databases import SqliteTemplate
from guarded_redis import emptied, guarded_redis
from redis.backoff import NoBackoff
from redis.retry import Retry

from tuna.db import sessions
from tuna.db.engine import reading, writing
from tuna.db.models import Token, Worker
from tuna.errors import BadInput, ServiceError
from tuna.libraries.registry import get_library
from tuna.membership import join as joining
from tuna.membership import members as store
from tuna.membership.gate import Gate
from tuna.membership.join import Facts, JoinToken, join, join_user, request_key
from tuna.queue import keys
from tuna.queue.announcements import control_key
from tuna.queue.heartbeat import HeartbeatBoard, WorkerStatus
from tuna.queue.leases import Leases
from tuna.services import redis_client

HOME = get_library("noop").environment()
COMPILER = Facts(
    host="some host", pid=7, processes=3, toolchains=(HOME.toolchain, "other 1.0 [x]*")
)
DEVICE = Facts(host="card1", pid=8, device="card", environments=(HOME.key,))


@pytest.fixture(scope="module")
def url() -> Iterator[str]:
    with guarded_redis() as found:
        yield found


@pytest.fixture()
def admin(url: str) -> redis.Redis:
    return emptied(url)


@pytest.fixture()
def engine(sqlite_engine: sa.Engine) -> sa.Engine:
    with writing(sqlite_engine) as connection:
        sessions.create(connection, HOME, "r")
    return sqlite_engine


@pytest.fixture()
def gate(engine: sa.Engine, admin: redis.Redis) -> Gate:
    return Gate(engine, admin, "n", 10, Leases(admin, "n", 10).evict, {"TUNA_ARTIFACTS_KEY": "k"})


@contextmanager
def ticking(gate: Gate) -> Iterator[None]:
    """The gate as a coordinator keeps it."""
    stop = threading.Event()

    def work() -> None:
        while not stop.wait(0.05):
            gate.tick()

    thread = threading.Thread(target=work)
    thread.start()
    try:
        yield
    finally:
        stop.set()
        thread.join()


def member(
    gate: Gate, url: str, role: str = "compile", facts: Facts = COMPILER
) -> tuple[str, redis.Redis]:
    """A worker that joined: its name, and its own client."""
    token = gate.create_token(role, 60, url)
    with ticking(gate):
        settings = join(token.full(), role, facts, 10)
    return settings["TUNA_WORKER_NAME"], redis.Redis.from_url(settings["TUNA_BROKER_URL"])


def test_a_token_lets_one_worker_in_once(
    gate: Gate, url: str, admin: redis.Redis, engine: sa.Engine, monkeypatch: pytest.MonkeyPatch
) -> None:
    token = gate.create_token("compile", 60, url)
    with ticking(gate):
        settings = join(token.full(), "compile", COMPILER, 10)
        assert settings["TUNA_NAMESPACE"] == "n"
        assert settings["TUNA_ARTIFACTS_KEY"] == "k"
        client = redis.Redis.from_url(settings["TUNA_BROKER_URL"])
        assert client.ping()
        with pytest.raises((BadInput, ServiceError)):
            join(token.full(), "compile", COMPILER, 2)
    monkeypatch.setattr("tuna.membership.revocation.ANSWER_GRACE_S", 0.0)
    admin.delete(f"tuna:{{n}}:join:{token.id}:answer")
    gate.tick()
    assert join_user("n", token.id) not in admin.acl_users(), (
        "the join user is gone once the answer was fetched"
    )
    with pytest.raises(BadInput, match="was used before"):
        join(token.full(), "compile", COMPILER, 2)
    with reading(engine) as connection:
        (worker,) = store.members(connection)
        assert worker.name == settings["TUNA_WORKER_NAME"]
        assert (worker.toolchains, worker.processes) == (COMPILER.toolchains, 3)
        stored = str(
            connection.execute(sa.select(Token.__table__)).all()
            + connection.execute(sa.select(Worker.__table__)).all()
        )
    for secret in (
        token.secret,
        token.password,
        settings["TUNA_BROKER_URL"].split(":")[2].split("@")[0],
    ):
        assert secret not in stored
        assert secret not in repr(token)


def test_two_with_the_same_token_at_once_make_one_member(
    gate: Gate, url: str, engine: sa.Engine
) -> None:
    token = gate.create_token("compile", 60, url)
    let_in: list[dict[str, str]] = []

    def attempt() -> None:
        with suppress(BadInput, ServiceError):
            let_in.append(join(token.full(), "compile", COMPILER, 2))

    threads = [threading.Thread(target=attempt) for _ in range(2)]
    with ticking(gate):
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
    assert len(let_in) == 1
    with reading(engine) as connection:
        assert len(store.members(connection)) == 1


def test_an_expired_a_revoked_and_an_unknown_token_are_refused(
    gate: Gate, url: str, engine: sa.Engine
) -> None:
    expired, revoked, known = (gate.create_token("compile", ttl, url) for ttl in (-1, 60, 60))
    with writing(engine) as connection:
        store.revoke_token(connection, revoked.id)
    gate.tick()
    unknown = replace(known, id="0" * 12)
    forged = replace(known, secret="x" * 30)
    for token in (expired, revoked, unknown, forged):
        with pytest.raises(BadInput, match="unknown, was used before, or has expired"):
            join(token.full(), "compile", COMPILER, 0.5)


def test_a_request_with_the_wrong_secret_is_refused_whoever_wrote_it(
    gate: Gate, url: str, admin: redis.Redis
) -> None:
    token = gate.create_token("compile", 60, url)
    text = '{"secret": "another", "role": "compile", "facts": {"host": "h", "pid": 1}}'
    for request in (text, "{", '{"role": "admin"}'):
        admin.set(request_key("n", token.id), request)
        gate.tick()
        answer = admin.getdel(f"tuna:{{n}}:join:{token.id}:answer")
        assert b'"password":""' in answer
        assert b'"refusal":"its' in answer


def test_the_wrong_role_and_the_wrong_environment_are_refused_and_the_token_stays_good(
    gate: Gate, url: str, engine: sa.Engine
) -> None:
    token = gate.create_token("eval", 60, url)
    with ticking(gate):
        with pytest.raises(BadInput, match="its token is for eval workers"):
            join(token.full(), "compile", COMPILER, 10)
        with pytest.raises(BadInput, match="no session is for its environment"):
            join(token.full(), "eval", DEVICE.model_copy(update={"environments": ("f" * 16,)}), 10)
        with reading(engine) as connection:
            assert store.members(connection) == []
        assert join(token.full(), "eval", DEVICE, 10)
        other = gate.create_token("compile", 60, url)
        with pytest.raises(BadInput, match="no session needs a toolchain"):
            join(
                other.full(), "compile", COMPILER.model_copy(update={"toolchains": ("other",)}), 10
            )


def test_a_stranger_gets_nothing(gate: Gate, url: str) -> None:
    gate.create_token("compile", 60, url)
    stranger = redis.Redis.from_url(url)
    with pytest.raises(redis.AuthenticationError):
        stranger.get("unacked")


def test_a_revoked_worker_loses_its_connections_its_chunks_and_its_voice(
    gate: Gate, url: str, admin: redis.Redis, engine: sa.Engine
) -> None:
    (name, client), (other, client2) = member(gate, url), member(gate, url)
    leases = Leases(admin, "n", 60)
    leases.open(["c", "d", "unbegun"])
    # as a coordinator does when it deals
    for chunk, holder in (("c", name), ("d", other), ("unbegun", name)):
        assert leases.take(chunk, f"{holder}:dealt/{chunk}", "started")
    admin.hset(leases.dealt_counts_key, mapping={"c/reports": 1, "d/reports": 1})
    HeartbeatBoard(admin, "n", 60).announce(
        WorkerStatus(f"{name}:1", "compile", "h", 1, "", "", (), (1,), 1.0, 1.0)
    )
    with writing(engine) as connection:
        assert store.set_state(connection, name, "revoked")
        assert not store.set_state(connection, name, "active"), "nobody comes back"
    gate.tick()
    with pytest.raises((redis.AuthenticationError, redis.ConnectionError)):
        client.xadd(keys.prefix("n", name) + "reports", {"r": "late"})
    assert not leases.finish("c", f"{name}:dealt/c", "late"), (
        "not even with somebody else's credentials"
    )
    assert (leases.expired(), leases.missing(["unbegun"])) == (["c"], ["unbegun"])
    assert not leases.take("c", "t", "x")
    assert leases.finish("d", f"{other}:dealt/d", "done"), "the other worker goes on"
    assert client2.ping()
    assert HeartbeatBoard(admin, "n", 60).live() == []
    assert [fields[b"r"] for _, fields in admin.xrange("tuna:{n}:results")] == [b"started"] * 3 + [
        b"done"
    ]


def test_a_worker_that_is_revoked_while_its_user_is_made_does_not_come_back(
    gate: Gate, url: str, admin: redis.Redis, engine: sa.Engine, monkeypatch: pytest.MonkeyPatch
) -> None:
    name, _ = member(gate, url)
    user = f"tuna-n-{name}"
    admin.acl_deluser(user)  # Redis was wiped, and the gate is about to make its users again
    make = gate.access.admit

    def revoked_before(*words: Any) -> None:
        with writing(engine) as connection:
            store.set_state(connection, name, "revoked")
        Gate(engine, admin, "n", 10, Leases(admin, "n", 10).evict).revocation.clear(
            name
        )  # as `tuna workers revoke` does
        make(*words)

    monkeypatch.setattr(gate.access, "admit", revoked_before)
    gate.reconcile()
    assert user not in admin.acl_users()


def test_an_coordinator_removes_users_that_an_earlier_one_left(
    gate: Gate, admin: redis.Redis
) -> None:
    admin.acl_setuser("tuna-n-compile-host-1", enabled=True, nopass=True)
    gate.tick()
    assert "tuna-n-compile-host-1" not in admin.acl_users()


def test_a_worker_that_is_silent_for_long_loses_its_access(
    engine: sa.Engine, admin: redis.Redis, url: str, eventually: Callable[..., None]
) -> None:
    gate = Gate(engine, admin, "n", 10, Leases(admin, "n", 10).evict, member_timeout_s=0.4)
    (name, _), (alive, _) = member(gate, url), member(gate, url)
    HeartbeatBoard(admin, "n", 60).announce(
        WorkerStatus(f"{alive}:1", "compile", "h", 1, "", "", (), (), 1.0, 1.0)
    )

    def gone() -> bool:
        gate.tick()
        return f"tuna-n-{name}" not in admin.acl_users()

    eventually(gone, 10)
    assert f"tuna-n-{alive}" in admin.acl_users()
    with reading(engine) as connection:
        assert {m.name: m.state for m in store.members(connection, include_former=True)} == {
            name: "gone",
            alive: "active",
        }


def test_after_redis_forgot_its_users_the_gate_makes_them_again(
    gate: Gate, url: str, admin: redis.Redis
) -> None:
    name, client = member(gate, url)
    token = gate.create_token("compile", 60, url)
    for user in (f"tuna-n-{name}", join_user("n", token.id)):
        admin.acl_deluser(user)
    gate.tick()
    assert client.ping()
    with ticking(gate):
        assert join(token.full(), "compile", COMPILER, 10)


@pytest.fixture()
def one_attempt(monkeypatch: pytest.MonkeyPatch) -> None:
    """A joining worker's client does not repeat a command by itself."""
    retry = Retry(NoBackoff(), 0)
    client = lambda url, **options: redis.Redis.from_url(url, retry=retry, **options)  # noqa: E731
    monkeypatch.setattr(redis_client, "retrying_client", client)


@pytest.mark.usefixtures("one_attempt")
def test_a_worker_that_waits_for_its_answer_outlives_a_restart_of_redis(
    gate: Gate, url: str, admin: redis.Redis, eventually: Callable[..., None]
) -> None:
    """Redis has no users then until a coordinator makes them again: the worker ended, as if its
    token were none."""
    token = gate.create_token("compile", 60, url)
    with futures.ThreadPoolExecutor(1) as pool:
        asking = pool.submit(join, token.full(), "compile", COMPILER, 20)
        eventually(lambda: admin.exists(request_key("n", token.id)), 10)
        admin.acl_deluser(join_user("n", token.id))
        admin.flushall()
        futures.wait([asking], 0.6)
        with ticking(gate):
            assert asking.result()


@pytest.mark.usefixtures("one_attempt")
def test_a_token_that_is_used_up_meanwhile_is_refused(
    gate: Gate,
    url: str,
    admin: redis.Redis,
    eventually: Callable[..., None],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(joining, "_OUTAGE_S", 0.5)
    token = gate.create_token("compile", 60, url)
    with futures.ThreadPoolExecutor(1) as pool:
        asking = pool.submit(join, token.full(), "compile", COMPILER, 20)
        eventually(lambda: admin.exists(request_key("n", token.id)), 10)
        admin.acl_deluser(join_user("n", token.id))
    with pytest.raises(BadInput, match="was used before"):
        asking.result()


def test_two_databases_in_one_redis_leave_each_others_members_alone(
    gate: Gate, url: str, admin: redis.Redis, sqlite_template: SqliteTemplate, tmp_path: Path
) -> None:
    _, client = member(gate, url)
    other = sqlite_template.engine(tmp_path / "o.sqlite")
    with writing(other) as connection:
        sessions.create(connection, HOME, "r")
    second = Gate(other, admin, "m", 10, Leases(admin, "m", 10).evict)
    stranger, _ = member(second, url)
    with writing(other) as connection:
        store.set_state(connection, stranger, "revoked")
    second.tick()
    assert client.ping()
    assert not [user for user in admin.acl_users() if user == f"tuna-m-{stranger}"]


def test_a_gate_without_rights_says_so_and_nothing_breaks(
    engine: sa.Engine, url: str, gate: Gate
) -> None:
    _, client = member(gate, url)
    powerless = Gate(engine, client, "n", 10, Leases(client, "n", 10).evict)
    powerless.tick()
    powerless.tick()


def test_orders_follow_the_state_in_sql(
    gate: Gate, url: str, engine: sa.Engine, admin: redis.Redis
) -> None:
    name, client = member(gate, url)
    with writing(engine) as connection:
        store.set_state(connection, name, "cordoned")
    gate.tick()
    assert client.get(control_key("n", name)) == b"cordoned"
    gate.control(name, "active")
    assert client.get(control_key("n", name)) is None


@pytest.mark.parametrize(
    "text",
    [
        "",
        "redis://h:1/0",
        "http://h/0#n.0123456789ab.sssssssssssssssssssssss",
        "redis://h/0#n.zz.secretsecret",
    ],
)
def test_what_is_not_a_token_is_refused_and_not_repeated(text: str) -> None:
    with pytest.raises(BadInput) as error:
        JoinToken.parse(text)
    assert "secret" not in str(error.value)


def test_with_nobody_at_the_gate_the_worker_gives_up_in_time(gate: Gate, url: str) -> None:
    token = gate.create_token("compile", 60, url)
    with pytest.raises(ServiceError, match="No coordinator answered"):
        join(token.full(), "compile", COMPILER, 0.5)
