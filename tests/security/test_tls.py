"""TLS to Redis and the broker: a server that cannot prove its name gets no byte of what the client
would say to it."""

from __future__ import annotations

import contextlib
import socket
import ssl
import threading
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
from certificates import DAY, NOW, Authority
from private_servers import free_port, running
from settings_changes import change_setting
from shared_data import needed_program

from tuna.errors import BadInput, TunaError
from tuna.queue.connection import connect, connect_broker, make_celery
from tuna.services.redis_client import single_attempt_client
from tuna.settings import Settings, get_settings

PASSWORD = "hunter2"  # noqa: S105 (nobody's)


@pytest.fixture(scope="module")
def authority(tmp_path_factory: pytest.TempPathFactory) -> Authority:
    return Authority(tmp_path_factory.mktemp("tls"))


@pytest.fixture(scope="module")
def certificates(authority: Authority) -> dict[str, Path]:
    return {
        "right": authority.issue("right.pem", "127.0.0.1"),
        "of another name": authority.issue("name.pem", "redis.example"),
        "expired": authority.issue("expired.pem", "127.0.0.1", until=NOW - DAY),
        "self-signed": authority.issue("self.pem", "127.0.0.1", self_signed=True),
    }


class Recorder:
    """A TLS server that records what it is told after the handshake, and ends the connection."""

    def __init__(self, certificate: Path) -> None:
        self.heard = b""
        self.callers = 0
        self._context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
        self._context.load_cert_chain(certificate)
        self._socket = socket.create_server(("127.0.0.1", 0))
        self.port = self._socket.getsockname()[1]
        self._thread = threading.Thread(target=self._serve, daemon=True)
        self._thread.start()

    def _serve(self) -> None:
        while True:
            try:
                caller, _ = self._socket.accept()
            except OSError:
                return
            caller.settimeout(5)
            self.callers += 1
            with (
                contextlib.suppress(OSError),
                self._context.wrap_socket(caller, server_side=True) as stream,
            ):
                self.heard += stream.recv(1000)

    def close(self) -> None:
        self._socket.shutdown(socket.SHUT_RDWR)
        self._socket.close()
        self._thread.join()


@pytest.fixture()
def recorder(certificates: dict[str, Path]) -> Iterator[Callable[[str], Recorder]]:
    started: list[Recorder] = []

    def start(kind: str) -> Recorder:
        started.append(Recorder(certificates[kind]))
        return started[-1]

    yield start
    for server in started:
        server.close()


def _redis(url: str) -> None:
    single_attempt_client(url, 3).ping()


def _publish(url: str) -> None:
    """As a coordinator does."""
    app = make_celery(Settings(broker_url=url, redis_url="redis://127.0.0.1:1/0"))
    with app.connection_for_write(connect_timeout=3) as connection:
        connection.ensure_connection(max_retries=1, interval_start=0, timeout=3)
        connection.default_channel.queue_declare("q", passive=True)


def _broker(url: str) -> None:
    """As the doctor and the metrics do."""
    with connect_broker(
        Settings(broker_url=url, redis_url="redis://127.0.0.1:1/0"), 3
    ) as connection:
        connection.default_channel.queue_declare("q", passive=True)


WAYS = [
    pytest.param("rediss", _redis, id="redis-py"),
    pytest.param("rediss", _publish, id="celery"),
    pytest.param("rediss", _broker, id="kombu"),
    pytest.param("amqps", _publish, id="celery-amqps"),
    pytest.param("amqps", _broker, id="kombu-amqps"),
]


def _url(scheme: str, port: int, authority: Authority) -> str:
    return (
        f"{scheme}://tuna:{PASSWORD}@127.0.0.1:{port}/0?ssl_ca_certs={authority.folder / 'ca.pem'}"
    )


@pytest.mark.parametrize(
    ("kind", "with_ca"),
    [
        ("of another name", True),
        ("of another name", False),
        ("expired", True),
        ("self-signed", True),
    ],
)
@pytest.mark.parametrize(("scheme", "use"), WAYS)
def test_a_server_that_cannot_prove_its_name_hears_nothing(
    recorder: Callable[[str], Recorder],
    authority: Authority,
    monkeypatch: pytest.MonkeyPatch,
    scheme: str,
    use: Callable[[str], None],
    kind: str,
    with_ca: bool,
) -> None:
    server = recorder(kind)
    url = _url(scheme, server.port, authority)
    if not with_ca:  # the authorities of the system, of which this is one
        url = url.partition("?")[0]
        monkeypatch.setenv("SSL_CERT_FILE", str(authority.folder / "ca.pem"))
    # each transport has an error of its own
    with pytest.raises(Exception, match=r"(?i)certificate|SSL"):
        use(url)
    assert server.callers, "it was not even called"
    assert server.heard == b""


@pytest.mark.parametrize("with_ca", [True, False])
@pytest.mark.parametrize(("scheme", "use"), WAYS)
def test_a_server_that_proves_its_name_is_spoken_to(
    recorder: Callable[[str], Recorder],
    authority: Authority,
    monkeypatch: pytest.MonkeyPatch,
    scheme: str,
    use: Callable[[str], None],
    with_ca: bool,
) -> None:
    """The check of the tests above: the same servers, and what they record."""
    server = recorder("right")
    url = _url(scheme, server.port, authority)
    if not with_ca:
        url = url.partition("?")[0]
        monkeypatch.setenv("SSL_CERT_FILE", str(authority.folder / "ca.pem"))
    with contextlib.suppress(Exception):  # the recorder ends each connection
        use(url)
    assert server.heard.startswith(b"AMQP" if scheme == "amqps" else b"*")


@pytest.fixture()
def tls_redis(
    authority: Authority, certificates: dict[str, Path], tmp_path: Path
) -> Iterator[Callable[..., str]]:
    """`tls_redis(*options)`: URL of a Redis with the right certificate, and without a password
    unless the options have one."""
    right, port = str(certificates["right"]), free_port()
    files = [
        "--tls-cert-file",
        right,
        "--tls-key-file",
        right,
        "--tls-ca-cert-file",
        str(authority.folder / "ca.pem"),
    ]
    server = needed_program("/usr/bin/redis-server")
    words = [
        server,
        "--port",
        "0",
        "--tls-port",
        str(port),
        "--bind",
        "127.0.0.1",
        "--save",
        "",
        *files,
    ]
    with contextlib.ExitStack() as stack:

        def start(*options: str) -> str:
            address, log = ("127.0.0.1", port), tmp_path / "log"
            try:
                stack.enter_context(
                    running([*words, "--dir", str(tmp_path), *options], address, log)
                )
            except TunaError as error:
                if "Bad directive" not in str(error) and "without TLS" not in str(error):
                    raise
                pytest.skip("redis-server was built without TLS")
            return _url("rediss", port, authority).replace(f"tuna:{PASSWORD}@", "")

        yield start


def test_celery_works_with_a_redis_that_asks_for_a_certificate(
    tls_redis: Callable[..., str], certificates: dict[str, Path]
) -> None:
    """Without one, Redis refuses; with one, Celery and redis-py use it."""
    url, right = tls_redis(), certificates["right"]
    with pytest.raises(TunaError, match="cannot be used"):
        connect(Settings(redis_url=url))
    settings = Settings(broker_url=f"{url}&ssl_certfile={right}&ssl_keyfile={right}")
    app = make_celery(settings)
    with app.producer_or_acquire() as producer:
        app.send_task("tuna.run_chunk", queue="q", producer=producer, ignore_result=True)
    assert connect(settings).llen("q") == 1
    with connect_broker(settings, 3) as connection:
        assert connection.default_channel.queue_declare("q", passive=True).message_count == 1


@pytest.mark.parametrize("variable", ["TUNA_BROKER_URL", "TUNA_REDIS_URL", "CELERY_BROKER_URL"])
@pytest.mark.parametrize(
    "query", ["ssl_cert_reqs=none", "ssl_cert_reqs=CERT_NONE", "ssl_check_hostname=false"]
)
def test_a_url_cannot_turn_verification_off(
    monkeypatch: pytest.MonkeyPatch, variable: str, query: str
) -> None:
    change_setting(monkeypatch, variable, f"rediss://:{PASSWORD}@h/0?{query}")
    with pytest.raises(BadInput, match=f"{query.partition('=')[0]}.*always verified") as refused:
        get_settings()
    assert PASSWORD not in str(refused.value)


@pytest.mark.parametrize(
    "url",
    [
        "amqp://h//?ssl=true",
        "rediss://a/0;rediss://b/0",
        "redis://a/0;rediss://b/0",
        "amqp://a;amqps://b",
    ],
)
def test_urls_that_celery_would_not_verify_are_refused(
    monkeypatch: pytest.MonkeyPatch, url: str
) -> None:
    """Celery encrypts with `ssl=true`, too, and goes on to the next of several servers, without a
    name to check."""
    change_setting(monkeypatch, "TUNA_BROKER_URL", url)
    with pytest.raises(BadInput, match="TUNA_BROKER_URL"):
        get_settings()


def test_celery_needs_no_result_backend(monkeypatch: pytest.MonkeyPatch) -> None:
    """Celery's refuses a `rediss://` without `ssl_cert_reqs`, and would connect by itself."""
    monkeypatch.setenv("CELERY_RESULT_BACKEND", "rediss://127.0.0.1:1/0")
    app = make_celery(Settings(broker_url="rediss://127.0.0.1:1/0"))
    assert type(app.backend).__name__ == "DisabledBackend"


def test_celery_takes_the_broker_of_the_settings(monkeypatch: pytest.MonkeyPatch) -> None:
    """Celery reads CELERY_BROKER_URL itself, before what it is given."""
    monkeypatch.setenv("CELERY_BROKER_URL", "amqp://other")
    app = make_celery(Settings(broker_url="rediss://one/0", redis_url="redis://one/0"))
    assert app.connection_for_read().hostname == app.connection_for_write().hostname == "one"
