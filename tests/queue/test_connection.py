"""Connections follow the settings of the moment: a process may open one home after another."""

from __future__ import annotations

import os
import signal
import socket
from pathlib import Path
from typing import Any, cast

import pytest
import redis
from private_servers import redis_server
from pydantic import SecretStr

from tuna.errors import ServiceError
from tuna.queue.connection import (
    broker_url,
    connect,
    connect_broker,
    make_celery,
    queue_depth,
)
from tuna.services import embedded_redis, redis_client
from tuna.services.embedded_redis import EmbeddedRedis
from tuna.settings import Settings


def test_each_home_has_its_own_broker(tmp_path: Path) -> None:
    """A coordinator kept the broker of the first home that its process had opened, which was
    gone."""
    for name in ("one", "other"):
        settings = Settings(home=tmp_path / name)
        server = EmbeddedRedis(settings.run_dir)
        server.acquire()
        try:
            app = make_celery(settings)
            with app.producer_or_acquire() as producer:
                app.send_task("tuna.run_chunk", queue="q", producer=producer, ignore_result=True)
            with app.connection_for_read() as connection:
                assert queue_depth(connection, "q") == 1
            assert connect(settings).llen("q") == 1
        finally:
            server.release()


def test_the_password_of_the_embedded_broker_is_in_no_text_of_a_connection(tmp_path: Path) -> None:
    """What Celery's banner and its errors name is `as_uri`."""
    settings = Settings(home=tmp_path / "home")
    password = embedded_redis.credentials(settings.run_dir).partition(":")[2]
    assert password in broker_url(settings)
    with make_celery(settings).connection_for_read() as connection:
        assert password not in connection.as_uri() + repr(connection)
    with pytest.raises(ServiceError) as raised:  # no server runs
        connect(settings)
    assert password not in f"{raised.value} {raised.value.hint} {raised.value.__context__}"


def test_an_outage_is_waited_for_by_who_may_wait(tmp_path: Path) -> None:
    """A worker that was started while Redis restarted ended with an error."""
    settings = Settings(home=tmp_path / "home")
    server = EmbeddedRedis(settings.run_dir)
    client, refused = redis.Redis.ping, []

    def ping(self: redis.Redis) -> object:
        if len(refused) < 2:
            refused.append("no server runs")
            raise redis.ConnectionError(refused[-1])
        return client(self)

    server.acquire()
    try:
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(redis.Redis, "ping", ping)
            assert connect(settings, wait_s=3600).exists("q") == 0
            assert len(refused) == 2
            refused.clear()
            with pytest.raises(ServiceError, match="cannot be used: no server runs"):
                connect(settings)
    finally:
        server.release()


def test_what_is_no_outage_is_not_waited_for(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def ping(_: redis.Redis) -> None:
        raise redis.AuthenticationError("invalid username-password pair")

    monkeypatch.setattr(redis.Redis, "ping", ping)
    with pytest.raises(ServiceError, match="invalid username-password pair"):
        connect(Settings(home=tmp_path / "home"), wait_s=3600)


@pytest.mark.service
def test_a_command_that_a_stopped_redis_does_not_answer_is_sent_once(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(redis_client, "ANSWER_S", 0.2)
    with redis_server() as url, redis_client.retrying_client(url) as client:
        process = int(cast(Any, client.info())["process_id"])
        os.kill(process, signal.SIGSTOP)
        try:
            with pytest.raises(redis.TimeoutError) as lost:
                client.incr("sent")
        finally:
            os.kill(process, signal.SIGCONT)
        assert redis_client.is_outage(lost.value)
        assert client.get("sent") in (b"1", "1")


def test_a_redis_that_takes_connections_and_says_nothing_is_named(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setattr(redis_client, "CONNECT_S", 0.2)
    with socket.create_server(("127.0.0.1", 0)) as silent:
        port = silent.getsockname()[1]
        settings = Settings(home=tmp_path, redis_url=SecretStr(f"redis://127.0.0.1:{port}/0"))
        with pytest.raises(ServiceError, match=f"Redis at 127.0.0.1:{port} cannot be used"):
            connect(settings)


def test_a_broker_that_takes_connections_and_says_nothing_is_named(tmp_path: Path) -> None:
    with socket.create_server(("127.0.0.1", 0)) as silent:
        url = SecretStr(f"redis://127.0.0.1:{silent.getsockname()[1]}/0")
        with pytest.raises(ServiceError, match=r"The broker, redis at .* does not answer"):
            with connect_broker(Settings(home=tmp_path, broker_url=url), 1):
                pass
