"""What the Redis users of members and of tokens may do: each command and each key."""

from __future__ import annotations

import pytest
import redis
from guarded_redis import ADMIN
from joined_site import COMPILER, DEVICE, HOME, Site

from tuna.membership.join import answer_key, request_key
from tuna.queue import keys
from tuna.queue.announcements import control_key
from tuna.testing.servers import with_password

#: Commands on one key that a member's own keys would allow, were they not missing from its rights:
#: slow, or not needed.
_KEY_COMMANDS = [
    "DEL {}", "UNLINK {}", "EXPIRE {} 1", "RENAME {} {}", "DUMP {}", "RESTORE {} 0 x", "TYPE {}", "OBJECT FREQ {}", "SORT {}",
    "MEMORY USAGE {}", "MEMORY DOCTOR", "HGETALL {}", "LRANGE {} 0 -1", "XRANGE {} - +", "XREAD STREAMS {} 0", "XTRIM {} MAXLEN 0",
    "XGROUP CREATE {} g 0", "XDEL {} 1-1", "SETRANGE {} 536870911 x", "SETBIT {} 4294967295 1", "APPEND {} x", "SET {} x",
    "MIGRATE h 1 {} 0 1", "COPY {} {}", "MOVE {} 1", "PFADD {} x", "GEOADD {} 1 1 x", "SUNIONSTORE {} {}", "BITOP NOT {} {}",
    "LCS {} {}", "ZADD {} 1 x", "PUBLISH {} x", "SUBSCRIBE {}", "SSUBSCRIBE {}", "WATCH {}",
]  # fmt: skip
_ADMINISTRATION = [
    "CONFIG GET *", "CONFIG SET maxmemory 1", "CONFIG REWRITE", "ACL LIST", "ACL SETUSER evil on nopass ~* +@all", "ACL WHOAMI",
    "ACL GENPASS", "KEYS *", "SCAN 0", "FLUSHALL", "FLUSHDB", "SCRIPT FLUSH", "SCRIPT LOAD x", "SCRIPT KILL", "SHUTDOWN",
    "CLIENT LIST", "CLIENT KILL ID 1", "CLIENT PAUSE 1000", "CLIENT NO-EVICT on", "CLIENT SETNAME x", "CLIENT TRACKING on",
    "CLIENT UNBLOCK 1", "DEBUG SLEEP 0", "SAVE", "BGSAVE", "BGREWRITEAOF", "LASTSAVE", "REPLICAOF no one", "SYNC", "PSYNC ? -1",
    "MONITOR", "INFO", "PSUBSCRIBE *", "MODULE LIST", "MODULE LOAD x", "RANDOMKEY", "DBSIZE", "SWAPDB 0 1", "SELECT 1", "WAIT 1 0",
    "EVAL return(1) 0", "EVALSHA x 0", "EVAL_RO return(1) 0", "FUNCTION LOAD x", "FUNCTION FLUSH", "FCALL f 0", "PUBSUB CHANNELS",
    "LATENCY DOCTOR", "SLOWLOG GET", "COMMAND", "CLUSTER INFO", "FAILOVER", "TIME",
]  # fmt: skip
#: What a server says of commands that it does not have, or has switched off.
_MISSING = (
    "unknown command",
    "unknown subcommand",
    "debug command not allowed",
    "module command not allowed",
)


def _refused(client: redis.Redis, *words: str) -> None:
    with pytest.raises(redis.ResponseError) as error:
        client.execute_command(*words)
    said = str(error.value).lower()
    assert "permission" in said or said.startswith(_MISSING), said


@pytest.mark.parametrize("who", ["compile", "eval", "join"])
def test_a_user_reaches_its_own_keys_and_nothing_else(site: Site, who: str) -> None:
    other, _ = site.member("eval", DEVICE)
    foreign = keys.all_keys(site.namespace, other) + [
        f"tuna:{{{site.namespace}}}:" + name
        for name in ("leases", "results", "workers", "dealt", "store")
    ]
    foreign += [
        "unacked",
        f"compile.{HOME.toolchain}",
        f"eval.{HOME.key}",
        "anything",
        "tuna:namespaces",
        "tuna:{m}:leases",
    ]
    if who == "join":
        token = site.token()
        client = site.of_token(token)
        own = [request_key(site.namespace, token.id), answer_key(site.namespace, token.id)]
        assert [client.set(key, "x", ex=60) for key in own] == [True, True]
        call = client.getdel
    else:
        name, client = site.member(who, COMPILER if who == "compile" else DEVICE)
        own = keys.all_keys(site.namespace, name)
        assert [client.get(key) for key in own] == [None] * len(own)
        start = keys.prefix(site.namespace, name)
        foreign += [
            f"{own[0]}x",
            own[0][:-1],
            start,
            f"{start}xwork",
            control_key(site.namespace, other),
            f"tuna:{{{site.namespace}}}:worker:{name}:1",
        ]
        call = client.get
    foreign += [
        request_key(site.namespace, "0" * 12),
        *(key.upper() for key in own),
        *(f"{key}*" for key in own),
    ]
    for key in foreign:
        with pytest.raises(redis.exceptions.NoPermissionError):
            call(key)
    for command in _ADMINISTRATION:
        _refused(client, *command.split())
    for command in _KEY_COMMANDS:
        if who == "join" and command.startswith("SET "):
            continue
        _refused(client, *(word.format(own[0]) for word in command.split()))
    assert site.admin.acl_whoami() == "default"


def test_a_member_uses_its_own_keys(site: Site) -> None:
    name, client = site.member()
    start = keys.prefix(site.namespace, name)
    assert client.lpush(f"{start}work\x06\x163", "x") == 1
    assert client.brpop([f"{start}work", f"{start}work\x06\x163"], 1)
    assert client.hset(f"{start}dealt", "chunk", "token") == 1
    assert client.xadd(f"{start}reports", {"r": "x"})
    assert client.get(control_key(site.namespace, name)) is None


def test_in_another_database_than_the_first_a_member_reaches_that_one_alone(site: Site) -> None:
    url = site.url.removesuffix("/0") + "/3"
    there: redis.Redis = redis.Redis.from_url(with_password(url, ADMIN))
    name, client = Site(url, site.namespace, site.engine, there).member()
    assert client.hset(keys.prefix(site.namespace, name) + "dealt", "chunk", "token") == 1
    assert there.hlen(keys.prefix(site.namespace, name) + "dealt") == 1
    for number in (0, 1, 30):
        _refused(client, "SELECT", str(number))
