"""TCP ports to the embedded Redis: for those who authenticate, as long as the process lives that
opened them."""

from __future__ import annotations

import contextlib
import os
import signal
import socket
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
import redis
from redis.backoff import NoBackoff
from redis.retry import Retry

from tuna.errors import BadInput, ServiceError
from tuna.membership import tcp_port_child
from tuna.membership.tcp_port import open_port, open_ports
from tuna.services import embedded_redis
from tuna.services.embedded_redis import EmbeddedRedis
from tuna.testing.servers import listens

Eventually = Callable[[Callable[[], object], float], None]
HERE = "127.0.0.1"

STRANGERS_WORDS = (
    *(
        "PING",
        "GET key",
        "SET key 1",
        "CONFIG GET *",
        "ACL LIST",
        "ACL WHOAMI",
        "SELECT 1",
        "EVAL 1 0",
        "SUBSCRIBE x",
    ),
    *(
        "AUTH guessed",
        "AUTH default guessed",
        "AUTH default nopass",
        "AUTH tuna x",
        "HELLO 3",
        "HELLO 3 AUTH default x",
    ),
)
MASTER = """
import sys, time
from pathlib import Path
from tuna.services.embedded_redis import EmbeddedRedis
from tuna.membership.tcp_port import open_port
with open_port(EmbeddedRedis(Path(sys.argv[1])), "127.0.0.1", 0) as port:
    print(port, flush=True)
    time.sleep(600)
"""


@pytest.fixture()
def server(tmp_path: Path) -> Iterator[EmbeddedRedis]:
    made = EmbeddedRedis(tmp_path / "home" / "run")
    yield made
    made.release()


def _owner(server: EmbeddedRedis, port: int) -> redis.Redis:
    name, _, password = embedded_redis.credentials(server.run_dir).partition(":")
    retry = Retry(NoBackoff(), 0)
    return redis.Redis(HERE, port, username=name, password=password, socket_timeout=5, retry=retry)


def _is_closed(port: int) -> bool:
    with socket.socket() as one:
        return one.connect_ex((HERE, port)) != 0


def test_two_ports_reach_one_server_and_a_stranger_gets_nothing(server: EmbeddedRedis) -> None:
    with open_port(server, HERE, 0) as one, open_port(server, HERE, 0) as other:
        assert one != other
        assert sorted(open_ports(server.run_dir)) == sorted([(HERE, one), (HERE, other)])
        with _owner(server, one) as first, _owner(server, other) as second:
            first.set("key", b"x" * 3_000_000)
            assert second.strlen("key") == 3_000_000
            assert second.getrange("key", 0, -1) == b"x" * 3_000_000
        with (
            socket.create_connection((HERE, one), 5) as stranger,
            stranger.makefile("rb") as answers,
        ):
            for words in STRANGERS_WORDS:
                stranger.sendall(f"{words}\r\n".encode())
                assert answers.readline().startswith((b"-NOAUTH", b"-WRONGPASS", b"-ERR")), words
    assert _is_closed(one)
    assert _is_closed(other)
    assert open_ports(server.run_dir) == []


def test_the_password_is_in_no_command_line_environment_or_open_file(server: EmbeddedRedis) -> None:
    path = server.run_dir / "redis.password"
    with open_port(server, HERE, 0) as port:
        password = path.read_text()
        assert len(password) == 64
        assert path.stat().st_mode & 0o777 == 0o600
        with _owner(server, port) as client:
            pid = int(client.info()["process_id"])
        # the server and its guard
        for number in (pid, int(Path(f"/proc/{pid}/stat").read_text().split()[3])):
            for name in ("cmdline", "environ"):
                assert password not in Path(f"/proc/{number}/{name}").read_text()
    assert password not in (server.run_dir / "redis.log").read_text()


def test_a_port_in_use_is_refused_before_anything_is_written(server: EmbeddedRedis) -> None:
    with socket.socket() as other:
        other.bind((HERE, 0))
        other.listen()
        port = other.getsockname()[1]
        with (
            pytest.raises(BadInput, match=f"Port {port} of {HERE} is in use"),
            open_port(server, HERE, port),
        ):
            pass
    assert not server.run_dir.parent.exists()


@pytest.mark.parametrize("host", ["256.0.0.1", "nowhere.invalid", "192.0.2.1", "a" * 300])
def test_an_address_that_is_not_ours_is_refused_in_a_sentence(
    server: EmbeddedRedis, host: str
) -> None:
    with pytest.raises(BadInput, match="cannot be listened on"), open_port(server, host, 0):
        pass
    assert not server.run_dir.parent.exists()


def test_the_port_closes_though_its_process_was_killed(
    server: EmbeddedRedis, eventually: Eventually
) -> None:
    server.acquire()  # the server itself lives on
    master = subprocess.Popen(
        [sys.executable, "-c", MASTER, str(server.run_dir)], stdout=subprocess.PIPE, text=True
    )
    try:
        assert master.stdout is not None
        port = int(master.stdout.readline())
        assert open_ports(server.run_dir) == [(HERE, port)]
    finally:
        os.kill(master.pid, signal.SIGKILL)
        master.communicate()
    eventually(lambda: _is_closed(port), 5)
    eventually(lambda: open_ports(server.run_dir) == [], 5)
    with open_port(server, HERE, port), _owner(server, port) as client:
        assert client.ping()


def test_a_server_without_a_password_gets_no_port_and_is_used_as_before(
    server: EmbeddedRedis,
) -> None:
    """One that a process of an older version started."""
    server.acquire()
    with contextlib.closing(server.client()) as client:
        client.execute_command("ACL", "SETUSER", "default", "nopass")
    with pytest.raises(ServiceError, match="older version"), open_port(server, HERE, 0):
        pass
    other = EmbeddedRedis(server.run_dir)
    other.acquire()
    with contextlib.closing(other.client()) as client:
        assert client.ping()
    other.release()
    assert open_ports(server.run_dir) == []


def test_connections_above_the_bound_are_closed_and_the_others_go_on(
    server: EmbeddedRedis, monkeypatch: pytest.MonkeyPatch, eventually: Eventually
) -> None:
    source = Path(tcp_port_child.__file__).read_text()
    few = source.replace(
        f"MOST_CONNECTIONS = {tcp_port_child.MOST_CONNECTIONS}", "MOST_CONNECTIONS = 2"
    )
    assert few != source
    monkeypatch.setattr(
        "tuna.membership.tcp_port.bare_command",
        lambda _, *words: [sys.executable, "-c", f"{few}\nimport sys\nmain(sys.argv[1:])", *words],
    )
    with open_port(server, HERE, 0) as port, contextlib.ExitStack() as stack:
        kept = [stack.enter_context(_owner(server, port)) for _ in range(2)]
        assert all(client.ping() for client in kept)
        with _owner(server, port) as third, pytest.raises(redis.ConnectionError):
            third.ping()
        assert all(client.ping() for client in kept)
        kept[0].close()

        def is_admitted() -> bool:
            with _owner(server, port) as third:
                try:
                    return bool(third.ping())
                except redis.ConnectionError:
                    return False

        eventually(is_admitted, 5)


def test_where_the_path_of_the_socket_is_long(tmp_path: Path) -> None:
    made = EmbeddedRedis(tmp_path / ("long" * 30) / "run")
    try:
        with open_port(made, HERE, 0) as port, _owner(made, port) as client:
            assert client.ping()
            assert listens(str(made.socket))
    finally:
        made.release()
