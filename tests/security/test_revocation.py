"""Who has to go: revocation of members that resist it, and of those of another version."""

from __future__ import annotations

import os
import signal
import threading
import time
from collections.abc import Callable
from datetime import timedelta

import psutil
import pytest
import redis
import sqlalchemy as sa
from command_lines import Ended
from joined_site import ODD, Site, occupy
from shared_data import DRILLS

from tuna import api
from tuna.db.engine import writing
from tuna.db.models import Worker
from tuna.db.types import utc_now
from tuna.membership import members as store
from tuna.membership import revocation
from tuna.membership.access import Access
from tuna.membership.gate import Gate
from tuna.queue import keys
from tuna.settings import get_settings
from tuna.testing.servers import with_password


def _limit(site: Site, rules: str, monkeypatch: pytest.MonkeyPatch) -> None:
    site.admin.execute_command(
        "ACL", "SETUSER", "limited", "reset", "on", ">pw", "~*", "&*", *rules.split()
    )
    monkeypatch.setenv("TUNA_BROKER_URL", with_password(site.url, "pw", "limited"))
    get_settings.cache_clear()


def test_without_the_right_to_revoke_nothing_is_changed(
    site: Site, type_in: Callable[..., Ended], monkeypatch: pytest.MonkeyPatch
) -> None:
    name, client = site.member()
    token = site.token()
    _limit(site, "+@all -acl", monkeypatch)
    for words in (
        ("workers", "revoke", name),
        ("token", "revoke", token.id),
        ("token", "create", "--role", "eval"),
    ):
        ended = type_in("tuna", *words)
        assert ended.code == 5
        assert "may not administer users" in ended.err
        assert "see docs/usage.md, Membership" in ended.err
    assert site.worker(name).state == "active"
    assert site.token_row(token).revoked_at is None
    assert [one.id for one in api.list_tokens() if one.state == "open"] == [token.id]
    assert client.ping()


def test_a_wrong_password_of_the_admin_is_no_right_either(
    site: Site, type_in: Callable[..., Ended], monkeypatch: pytest.MonkeyPatch
) -> None:
    name, _ = site.member()
    monkeypatch.setenv("TUNA_REDIS_ADMIN_URL", with_password(site.url, "wrong"))
    get_settings.cache_clear()
    ended = type_in("tuna", "workers", "revoke", name)
    assert (ended.code, site.worker(name).state) == (5, "active")


def test_a_revoked_member_leaves_nothing_behind(site: Site, type_in: Callable[..., Ended]) -> None:
    (name, client), (other, others) = site.member(), site.member()
    occupy(site, name)
    occupy(site, other)
    before = site.left(other)
    assert type_in("tuna", "workers", "revoke", f"{name}:1").code == 0, "without any coordinator"
    assert site.left(name) == []
    assert site.leases(site.admin).expired() == [f"c-{name}"]
    assert not site.leases(site.admin).finish(f"c-{name}", f"{name}:1/t", "late")
    with pytest.raises(redis.ConnectionError):
        client.ping()
    assert sorted(site.left(other)) == sorted(before)
    assert others.ping()
    again = type_in("tuna", "workers", "revoke", name)
    assert (again.code, "revoked already" in again.err) == (2, True)


def test_nothing_that_a_member_wrote_is_read_before_it_is_revoked(
    site: Site, type_in: Callable[..., Ended]
) -> None:
    """M3: with such heartbeats `tuna workers` failed, and with it the command that puts the member
    out."""
    name, _ = site.member()
    occupy(site, name)
    board = f"tuna:{{{site.namespace}}}:worker"
    site.admin.set(f"{board}:{name}:1", b"[" * 200_000)
    site.admin.lpush(f"{board}:{name}:2", "a list")
    site.admin.sadd(f"{board}s", f"{name}:2", ODD)
    assert type_in("tuna", "workers", "revoke", name).code == 0
    assert site.left(name) == []


@pytest.mark.parametrize("key", ["workers", "holders"])
def test_a_step_that_fails_leaves_the_others_their_effect(
    site: Site, type_in: Callable[..., Ended], key: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    name, _ = site.member()
    occupy(site, name)
    spoiled = f"tuna:{{{site.namespace}}}:{key}"
    site.admin.delete(spoiled)
    site.admin.set(spoiled, "of the wrong type")
    ended = type_in("tuna", "workers", "revoke", name)
    assert ended.code == 5
    assert f"{name} is revoked in the database, but Redis is not cleared of it: its " in ended.err
    assert "a coordinator does it" in ended.err
    assert site.worker(name).state == "revoked"
    heartbeat = f"tuna:{{{site.namespace}}}:worker:{name}:1"
    assert site.left(name) == ([heartbeat] if key == "workers" else [])
    monkeypatch.setattr(revocation, "_LAST_WRITE_S", 0.0)
    site.gate.tick()
    assert site.worker(name).cleared_at is None, "it is not yet done"
    site.admin.delete(spoiled)
    site.new_gate().tick()
    assert site.worker(name).cleared_at is not None


@pytest.mark.parametrize("step", ["its Redis user", "its leases", "its keys", "its heartbeats"])
def test_each_step_works_alone_and_is_repeated(
    site: Site, step: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    name, _ = site.member()
    occupy(site, name)
    with writing(site.engine) as connection:
        store.set_state(connection, name, "revoked")
    take = site.gate.revocation._take

    def fail(*_: object) -> None:
        raise redis.ResponseError("no")

    monkeypatch.setattr(
        site.gate.revocation,
        "_take",
        lambda whose, steps: take(
            whose, {what: act if what == step else fail for what, act in steps.items()}
        ),
    )
    failed = site.gate.revocation.clear(name)
    assert len(failed) == 3
    left = site.left(name)
    gone = {
        "its Redis user": site.gate.access.user(name) not in left,
        "its leases": site.leases(site.admin).expired() == [f"c-{name}"],
        "its keys": not any(key in left for key in keys.all_keys(site.namespace, name)),
        "its heartbeats": f"tuna:{{{site.namespace}}}:worker:{name}:1" not in left,
    }
    assert [what for what, is_gone in gone.items() if is_gone] == [step]
    monkeypatch.undo()
    site.new_gate().revocation.clear_all()
    assert site.left(name) == []


def test_with_a_dead_redis_sql_is_changed_and_a_coordinator_does_the_rest(
    site: Site, type_in: Callable[..., Ended], monkeypatch: pytest.MonkeyPatch
) -> None:
    name, client = site.member()
    occupy(site, name)
    with monkeypatch.context() as dead:
        dead.setenv("TUNA_BROKER_URL", "redis://:x@127.0.0.1:1/0")
        get_settings.cache_clear()
        ended = type_in("tuna", "workers", "revoke", name)
    get_settings.cache_clear()
    assert ended.code == 5
    assert f"{name} is revoked in the database, but Redis is not cleared of it" in ended.err
    assert site.worker(name).state == "revoked"
    assert client.ping(), "nothing else could be done"
    site.new_gate().tick()
    assert site.left(name) == []


def test_a_redis_that_stands_still_does_not_stop_the_revocation_in_sql(
    site: Site, type_in: Callable[..., Ended], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("tuna.api.workers._ANSWER_S", 0.2)
    name, _ = site.member()
    process = psutil.Process(site.admin.info()["process_id"])
    process.send_signal(signal.SIGSTOP)
    try:
        ended = type_in("tuna", "workers", "revoke", name)
    finally:
        process.send_signal(signal.SIGCONT)
    assert (ended.code, site.worker(name).state) == (5, "revoked")
    site.new_gate().tick()
    assert site.left(name) == []


def test_what_a_coordinator_writes_for_a_member_a_moment_late_goes_too(
    site: Site, monkeypatch: pytest.MonkeyPatch
) -> None:
    name, _ = site.member()
    with writing(site.engine) as connection:
        store.set_state(connection, name, "revoked")
    site.gate.tick()
    assert site.left(name) == []
    assert site.worker(name).cleared_at is None
    # it read the member's row before
    site.admin.hset(keys.prefix(site.namespace, name) + "dealt", "c", "")
    long_ago = utc_now() - timedelta(seconds=revocation._LAST_WRITE_S + 1)
    with writing(site.engine) as connection:
        connection.execute(sa.update(Worker).values(revoked_at=long_ago))
    site.gate.tick()
    assert site.left(name) == []
    assert site.worker(name).cleared_at is not None
    before = site.admin.info("commandstats")
    site.gate.tick()
    assert (
        site.admin.info("commandstats")["cmdstat_unlink"]["calls"]
        == before["cmdstat_unlink"]["calls"]
    ), "once done"


def test_a_member_that_was_silent_for_long_leaves_nothing_behind(site: Site) -> None:
    name, _ = site.member()
    with writing(site.engine) as connection:
        connection.execute(sa.update(Worker).values(seen_at=utc_now() - timedelta(hours=2)))
    for key in keys.all_keys(site.namespace, name):
        site.admin.set(key, ODD)
    gate = site.new_gate()
    gate.tick()
    gate.tick()
    assert site.worker(name).state == "gone"
    assert site.left(name) == []


def test_a_member_that_writes_without_pause_is_out_within_two_seconds(
    site: Site, type_in: Callable[..., Ended]
) -> None:
    name, client = site.member()
    own = [
        key
        for key in keys.all_keys(site.namespace, name)
        if key.endswith(("dealt", "artifacts", "heartbeats"))
    ]
    stop, ended = threading.Event(), []

    def write(number: int) -> None:
        mine = redis.Redis.from_url(site.url, **_credentials(client))
        data = os.urandom(200_000)
        try:
            for turn in range(1_000_000):
                last = stop.is_set()  # it writes once more after the command has ended
                with mine.pipeline(transaction=False) as pipe:
                    for key in own:
                        pipe.hset(key, f"{number}-{turn % 50}", data)
                    pipe.execute()
                if last:
                    return
        except redis.RedisError as error:
            ended.append(error)

    threads = [threading.Thread(target=write, args=(number,)) for number in range(4)]
    for thread in threads:
        thread.start()
    time.sleep(0.5)
    begun = time.monotonic()
    done = type_in("tuna", "workers", "revoke", name)
    took = time.monotonic() - begun
    stop.set()
    for thread in threads:
        thread.join()
    assert done.code == 0
    assert len(ended) == 4, "each of its connections was closed, and none could be opened"
    assert site.left(name) == []
    print(f"revoked within {took:.2f} s")
    assert took < (2 if DRILLS > 1 else 10), "ten: on a busy machine"


def _credentials(client: redis.Redis) -> dict[str, str]:
    given = client.connection_pool.connection_kwargs
    return {"username": given["username"], "password": given["password"]}


def test_a_coordinator_without_rights_still_takes_what_it_can(
    site: Site, monkeypatch: pytest.MonkeyPatch
) -> None:
    name, _ = site.member()
    occupy(site, name)
    with writing(site.engine) as connection:
        store.set_state(connection, name, "revoked")
    site.admin.execute_command(
        "ACL", "SETUSER", "limited", "reset", "on", ">pw", "~*", "&*", "+@all", "-acl"
    )
    powerless = redis.Redis.from_url(with_password(site.url, "pw", "limited"))
    gate = Gate(site.engine, powerless, site.namespace, 20, site.leases(powerless).evict)
    monkeypatch.setattr(revocation, "_LAST_WRITE_S", 0.0)
    gate.tick()
    gate.tick()
    assert site.left(name) == [site.gate.access.user(name)]
    assert site.worker(name).cleared_at is None
    site.gate.tick()
    assert site.left(name) == []


def test_users_of_another_version_get_the_rights_of_this_one_and_lose_their_connections(
    site: Site,
) -> None:
    """A connection that waits in BRPOP when its rights end would still be served."""
    name, client = site.member()
    user = site.gate.access.user(name)
    rules = site.admin.acl_getuser(user)
    with writing(site.engine) as connection:
        store.set_rights(connection, name, "")
    site.admin.execute_command("ACL", "SETUSER", user, "~*", "&*", "+@all")
    order = f"tuna:{{{site.namespace}}}:order:{name}"
    site.admin.set(order, "cordoned")
    waiting = redis.Redis.from_url(site.url, **_credentials(client))
    caught: list[object] = []

    def wait() -> None:
        try:
            caught.append(waiting.brpop(["shared"]))
        except redis.ConnectionError:
            caught.append("closed")

    thread = threading.Thread(target=wait)
    thread.start()
    while not site.admin.info("clients")["blocked_clients"]:
        time.sleep(0.01)
    site.new_gate().tick()
    site.admin.rpush("shared", "another's")
    thread.join(5)
    assert not thread.is_alive()
    # redis-py connects again, with the rights of this version.
    assert caught != [(b"shared", b"another's")]
    assert site.admin.acl_getuser(user) == rules
    assert not site.admin.exists(order), "a key of that version"
    assert site.worker(name).rights == Access(site.admin, site.namespace).rights
