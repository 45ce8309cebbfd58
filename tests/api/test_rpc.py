"""A master's port and its workers, as the commands use them."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator
from pathlib import Path

import pytest
import redis

from tuna import api
from tuna.db import sessions
from tuna.db.database import open_database
from tuna.db.engine import reading
from tuna.errors import BadInput
from tuna.membership.join import JoinToken, join_user
from tuna.queue.connection import connect, release_services
from tuna.queue.heartbeat import HeartbeatBoard, WorkerStatus
from tuna.settings import get_settings


@pytest.fixture()
def master(home: Path) -> Iterator[str]:
    """The URL of a port."""
    with api.listening("127.0.0.1", 0) as url:
        yield url
    release_services(get_settings())


@pytest.mark.service
def test_a_token_of_an_open_port_reaches_the_keys_of_its_request_alone(master: str) -> None:
    token = JoinToken.parse(api.create_token("eval", 60.0))
    assert token.url == master
    user = join_user(token.namespace, token.id)
    with redis.Redis.from_url(token.url, username=user, password=token.password) as client:
        assert client.ping()
        for words in (
            ("GET", "x"),
            ("KEYS", "*"),
            ("ACL", "WHOAMI"),
            ("FLUSHALL",),
            ("CONFIG", "GET", "requirepass"),
        ):
            with pytest.raises(redis.exceptions.NoPermissionError):
                client.execute_command(*words)


def test_without_a_port_there_is_no_token(home: Path) -> None:
    with pytest.raises(BadInput, match="on this machine only") as raised:
        api.create_token("eval", 60.0)
    assert "tune-rpc" in raised.value.hint


def test_no_port_beside_a_broker_of_ones_own(home: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TUNA_BROKER_URL", "redis://127.0.0.1:1/0")
    get_settings.cache_clear()
    with pytest.raises(BadInput, match="TUNA_BROKER_URL is set"), api.listening("127.0.0.1", 0):
        pass


@pytest.mark.parametrize(
    ("host", "name"), [("::", "redis://here.example:1/0"), ("::1", "redis://[::1]:1/0")]
)
def test_the_url_of_a_port_is_one_that_others_can_use(
    host: str, name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    from tuna.api import rpc

    monkeypatch.setattr("socket.getfqdn", lambda: "here.example")
    assert rpc._url(host, 1) == name


@pytest.mark.service
def test_live_workers_of_a_session_are_those_that_measure_in_its_environment(master: str) -> None:
    session = api.init_session("noop", "rpc").id
    assert api.count_workers(session) == 0
    with reading(open_database()) as connection:
        namespace = sessions.namespace(connection)
        key = sessions.get(connection, session).environment.machine_key
    board = HeartbeatBoard(connect(get_settings()), namespace, 10)
    one = WorkerStatus("a:1", "eval", "a", 1, "", key, (), (), 1.0, 2.0)
    board.announce(one)
    board.announce(dataclasses.replace(one, name="b:1", environment=f"0123456789abcdef, {key}"))
    board.announce(dataclasses.replace(one, name="c:1", environment="0123456789abcdef"))
    board.announce(
        dataclasses.replace(one, name="d:1", role="compile", environment="", toolchains=("noop-1",))
    )
    assert api.count_workers(session) == 2
