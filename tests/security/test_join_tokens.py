"""Who may join: tokens in the hands of the hostile."""

from __future__ import annotations

import json
from collections.abc import Callable
from datetime import timedelta

import pytest
import redis
import sqlalchemy as sa
from command_lines import Ended
from joined_site import COMPILER, HOME, ODD, Site
from shared_data import DRILLS

from tuna.db.engine import reading, writing
from tuna.db.models import Token
from tuna.db.types import utc_now
from tuna.errors import BadInput
from tuna.membership import members as store
from tuna.membership import revocation
from tuna.membership.gate import Gate
from tuna.membership.join import MAX_REQUEST_BYTES, JoinToken, answer_key, join, request_key
from tuna.testing.servers import with_password


def _request(token: JoinToken, **facts: object) -> str:
    told = {"host": "h", "pid": 1, "toolchains": [HOME.toolchain]} | facts
    return json.dumps({"secret": token.secret, "role": "compile", "facts": told})


_HOSTILE: dict[str, Callable[[JoinToken], bytes | str]] = {
    "20 MB of claims": lambda token: _request(token, toolchains=["x" * 20_000_000]),
    "120 MB of claims": lambda token: _request(token, host="x" * 120_000_000),
    "many claims": lambda token: _request(token, environments=["f" * 16] * 65),
    "deep JSON": lambda token: b"[" * (MAX_REQUEST_BYTES - 1),
    "blanks": lambda token: _request(token, environments=[HOME.machine_key, " " * 16]),
    "globs": lambda token: _request(token, environments=["*", "[a-f]" * 3]),
    "blanks in a toolchain": lambda token: _request(token, toolchains=[HOME.toolchain, "a  b"]),
    "control characters": lambda token: _request(token, host="\x1b]0;x\x07\n"),
    "bytes that are no text": lambda token: ODD,
    "half a pair of surrogates": lambda token: _request(token, host="x").replace(
        '"x"', '"\\ud800"'
    ),
    "a number too large": lambda token: _request(token, pid=10**400),
    "another field": lambda token: _request(token, admin=True),
}


@pytest.mark.parametrize(
    "what", [what for what in _HOSTILE if DRILLS > 1 or not what.startswith("120")]
)
def test_a_hostile_request_is_refused_with_one_sentence_and_nothing_is_left(
    site: Site, what: str
) -> None:
    token = site.token()
    client = site.of_token(token)
    request = _HOSTILE[what](token)
    client.set(request_key(site.namespace, token.id), request)
    del request
    before = site.admin.info("stats")["total_net_output_bytes"]
    site.gate.tick()
    read = site.admin.info("stats")["total_net_output_bytes"] - before
    assert read < 10 * MAX_REQUEST_BYTES, "no more than its bound is read"
    with pytest.raises(
        BadInput,
        match=r"^Join refused: its request is (not valid|longer than 65,536 bytes)[^\n]*\.$",
    ):
        join(token.full(), "compile", COMPILER, 5)
    with reading(site.engine) as connection:
        assert store.members(connection, include_former=True) == []
    with writing(site.engine) as connection:
        connection.execute(sa.update(Token).values(revoked_at=utc_now()))
    site.gate.tick()
    assert site.left(token.id) == []
    assert site.token_row(token).cleared_at is not None


def test_a_request_that_is_too_long_uses_its_token_up(
    site: Site, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Or its holder could fill Redis again and again."""
    token = site.token()
    client = site.of_token(token)
    client.set(request_key(site.namespace, token.id), b"x" * (MAX_REQUEST_BYTES + 1))
    site.gate.tick()
    assert b"the token is used up" in client.getdel(answer_key(site.namespace, token.id))
    monkeypatch.setattr(revocation, "ANSWER_GRACE_S", 0.0)
    site.gate.tick()
    assert site.left(token.id) == []
    with pytest.raises(redis.ConnectionError):
        client.set(request_key(site.namespace, token.id), "x")


@pytest.mark.parametrize("expiry_s", [None, 61, 10**9])
def test_what_a_token_writes_as_its_own_answer_goes_at_once(
    site: Site, expiry_s: int | None
) -> None:
    """M6: what no coordinator had written in the key of the answer stayed."""
    token = site.token()
    key = answer_key(site.namespace, token.id)
    site.of_token(token).set(key, "x", ex=expiry_s)
    site.gate.tick()
    assert not site.admin.exists(key)
    assert site.while_ticking(lambda: join(token.full(), "compile", COMPILER, 10))


@pytest.mark.parametrize("expiry_s", [None, 60])
def test_a_token_that_fills_its_answer_is_used_up(
    site: Site, monkeypatch: pytest.MonkeyPatch, expiry_s: int | None
) -> None:
    """M6: 120 MB in the key of the answer."""
    token = site.token()
    client = site.of_token(token)
    client.set(answer_key(site.namespace, token.id), b"x" * (MAX_REQUEST_BYTES + 1), ex=expiry_s)
    site.gate.tick()
    assert b"the token is used up" in client.getdel(answer_key(site.namespace, token.id))
    monkeypatch.setattr(revocation, "ANSWER_GRACE_S", 0.0)
    site.gate.tick()
    assert site.left(token.id) == []


@pytest.mark.parametrize("how", ["expired", "revoked", "used"])
def test_a_spent_token_ends_its_connections_and_leaves_nothing_behind(
    site: Site, how: str, type_in: Callable[..., Ended], monkeypatch: pytest.MonkeyPatch
) -> None:
    token = site.token()
    client = site.of_token(token)
    # without expiry, and not to be answered: the coordinator is busy
    for name in (request_key, answer_key):
        client.set(name(site.namespace, token.id), "x")
    if how == "revoked":
        assert type_in("tuna", "token", "revoke", token.id).code == 0
        assert site.left(token.id) == [], "without any coordinator"
    values = {
        "expired": {"expires_at": utc_now()},
        "used": {"used_at": utc_now() - timedelta(seconds=61)},
        "revoked": {},
    }
    if values[how]:
        with writing(site.engine) as connection:
            connection.execute(sa.update(Token).values(values[how]))
    site.gate.tick()
    assert site.left(token.id) == []
    with pytest.raises(redis.ConnectionError):
        client.ping()


def test_the_user_of_a_used_token_stays_no_longer_than_its_answer(
    site: Site, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It may write to the key of its answer, and would otherwise never have to go."""
    token = site.token()
    client = site.of_token(token)
    site.while_ticking(lambda: join(token.full(), "compile", COMPILER, 10))
    client.set(answer_key(site.namespace, token.id), "x" * 1000)
    for age_s, there in ((10, True), (59, True), (61, False)):
        with writing(site.engine) as connection:
            connection.execute(
                sa.update(Token).values(used_at=utc_now() - timedelta(seconds=age_s))
            )
        site.gate.tick()
        assert bool(site.left(token.id)) is there


@pytest.mark.parametrize("name", [request_key, answer_key])
def test_the_user_of_a_used_token_that_fills_redis_goes_at_once(
    site: Site, name: Callable[[str, str], str]
) -> None:
    token = site.token()
    client = site.of_token(token)
    site.while_ticking(lambda: join(token.full(), "compile", COMPILER, 10))
    client.set(name(site.namespace, token.id), b"x" * (MAX_REQUEST_BYTES + 1))
    site.gate.tick()
    assert site.left(token.id) == []


def test_a_coordinator_without_rights_uses_no_token_up(site: Site) -> None:
    token = site.token()
    site.admin.execute_command(
        "ACL", "SETUSER", "limited", "reset", "on", ">pw", "~*", "&*", "+@all", "-acl"
    )
    powerless = redis.Redis.from_url(with_password(site.url, "pw", "limited"))
    site.of_token(token).set(request_key(site.namespace, token.id), _request(token))
    Gate(site.engine, powerless, site.namespace, 20, site.leases(powerless).evict).tick()
    assert site.token_row(token).used_at is None
    assert site.while_ticking(lambda: join(token.full(), "compile", COMPILER, 10))


def test_one_bad_request_does_not_keep_others_waiting(site: Site) -> None:
    bad, good = site.token(), site.token()
    site.of_token(bad).set(request_key(site.namespace, bad.id), ODD)
    assert site.while_ticking(lambda: join(good.full(), "compile", COMPILER, 10))


SCRIPTS = [
    ("EVAL", "while true do end", "0"),
    ("EVALSHA", "0" * 40, "0"),
    ("EVAL_RO", "return 1", "0"),
    ("SCRIPT", "LOAD", "return 1"),
    ("FUNCTION", "LOAD", "#!lua name=x\nredis.register_function('f', function() end)"),
    ("FCALL", "f", "0"),
]


@pytest.mark.parametrize("who", ["token", "member"])
def test_nobody_who_joins_runs_a_script(site: Site, who: str) -> None:
    """M7: an endless loop kept Redis busy until it was restarted."""
    client = site.of_token(site.token()) if who == "token" else site.member()[1]
    for words in SCRIPTS:
        with pytest.raises(redis.ResponseError, match=r"(?i)permission|unknown command"):
            client.execute_command(*words)
    with pytest.raises(redis.ResponseError):
        client.pipeline().execute_command(*SCRIPTS[0]).execute()
    assert site.admin.ping()
