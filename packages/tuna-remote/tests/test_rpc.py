"""Gateways and their workers, as the commands use them."""

from __future__ import annotations

import dataclasses
import socket
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
from private_servers import listens

from tuna import api
from tuna.db import sessions
from tuna.db.database import open_database
from tuna.db.engine import reading
from tuna.errors import BadInput
from tuna.queue.connection import connect, release_services
from tuna.queue.heartbeat import HeartbeatBoard, WorkerStatus
from tuna.services.ports import announced_urls
from tuna.settings import get_settings
from tuna_remote import joining
from tuna_remote.gateway.ports import GATEWAY, gateway_url
from tuna_remote.gateway.tokens import JoinToken

pytestmark = pytest.mark.usefixtures("forked")


@pytest.fixture()
def master(home: Path) -> Iterator[str]:
    """The URL of a port."""
    with joining.listening("127.0.0.1", 0) as url:
        yield url
    release_services(get_settings())


@pytest.mark.service
def test_a_token_names_the_gateway_of_this_home(master: str) -> None:
    token = JoinToken.parse(joining.create_token("eval", 60.0))
    assert token.gateway.url == master
    assert announced_urls(get_settings().run_dir, GATEWAY) == [master]


@pytest.mark.service
def test_two_gateways_of_one_home_have_one_key(master: str) -> None:
    with joining.listening("127.0.0.1", 0) as other:
        pins = {
            JoinToken.parse(joining.create_token("eval", 60, url)).gateway.pin
            for url in (master, other)
        }
    assert other != master
    assert len(pins) == 1


def test_without_a_gateway_there_is_no_token(home: Path) -> None:
    with pytest.raises(BadInput, match="No gateway") as raised:
        joining.create_token("eval", 60.0)
    assert "tuna gateway" in raised.value.hint
    assert joining.create_token("eval", 60.0, "https://elsewhere:1").startswith(
        "https://elsewhere:1#"
    )
    for url in ("redis://h:1/0", "http://h:1", "h:1", "https://h:1/x"):
        with pytest.raises(BadInput, match="not the URL of a gateway"):
            joining.create_token("eval", 60.0, url)


def test_a_port_in_use_is_refused_before_anything_is_written(home: Path) -> None:
    with socket.create_server(("127.0.0.1", 0)) as other:
        port = other.getsockname()[1]
        with (
            pytest.raises(BadInput, match=f"Port {port} of 127.0.0.1 is in use"),
            joining.listening("127.0.0.1", port),
        ):
            pass
    assert not (home / "run").exists()


def test_a_gateway_ends_with_the_process_that_started_it(
    home: Path, eventually: Callable[[Callable[[], object], float], None]
) -> None:
    code = (
        "import time; from tuna_remote import joining\nwith joining.listening('127.0.0.1', 0) as u:"
        " print(u, flush=True); time.sleep(600)"
    )
    with subprocess.Popen([sys.executable, "-c", code], stdout=subprocess.PIPE, text=True) as one:
        assert one.stdout is not None
        address = ("127.0.0.1", int(one.stdout.readline().rpartition(":")[2]))
        assert listens(address)
        one.kill()
    eventually(lambda: not listens(address), 60)
    assert announced_urls(get_settings().run_dir, GATEWAY) == []


@pytest.mark.parametrize(
    ("host", "name"), [("::", "https://here.example:1"), ("::1", "https://[::1]:1")]
)
def test_the_url_of_a_gateway_is_one_that_others_can_use(
    host: str, name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("socket.getfqdn", lambda: "here.example")
    assert gateway_url(host, 1) == name


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
