"""The process of a gateway."""

from __future__ import annotations

import contextlib
import os
import signal
import socket
import subprocess
import sys
from collections.abc import Callable, Iterator, Sequence

from tuna.api import Settings, get_settings
from tuna.api.rows import open_database, reading
from tuna.common import logs
from tuna.common.files import make_home
from tuna.common.lifetime import end_with_parent, forbid_inspection
from tuna.common.python import module_command
from tuna.errors import ServiceError
from tuna.queue import celery_internals
from tuna.queue.connection import connect, ensure_services, make_celery
from tuna.services.listening import GRACE_S, BoundedServer, Listener
from tuna.services.ports import listen
from tuna_remote.gateway import joined
from tuna_remote.gateway.ports import announced_gateway, gateway_url
from tuna_remote.gateway.server import GatewayApp
from tuna_remote.gateway.tokens import server_context


def gateway_listener(listening: Sequence[socket.socket], settings: Settings) -> Listener:
    """Return a gateway for the settings' database; raises DatabaseError, ServiceError."""
    engine = open_database()
    ensure_services(settings)
    app = GatewayApp(engine, connect(settings), make_celery(settings), settings)
    celery_internals.check_messages(app.dropped.add)
    with reading(engine) as connection:
        return Listener(listening, app.asgi(), server_context(joined.tls_secret(connection)))


def run_gateway(host: str, port: int, started: Callable[[str], None] = lambda _: None) -> None:
    """Run a gateway in the main thread until a signal comes; `started` is called with its URL.

    `port`: 0 for any. Raises BadInput for an address that cannot be had.
    """
    settings = get_settings()
    with contextlib.ExitStack() as stack:
        listening = [stack.enter_context(one) for one in listen(host, port)]
        number = int(listening[0].getsockname()[1])
        server = BoundedServer(gateway_listener(listening, settings))
        make_home(settings.home)
        stack.enter_context(announced_gateway(host, number))
        started(gateway_url(host, number))
        server.run()


@contextlib.contextmanager
def gateway_process(host: str, port: int, option: str = "--port") -> Iterator[str]:
    """Run a gateway as a process that ends with this one, while the block runs; yields its URL.

    `port`: 0 for any. Raises BadInput if the address cannot be had, before anything is written; its
    hint names the option.
    """
    with contextlib.ExitStack() as stack:
        listening = [stack.enter_context(one) for one in listen(host, port, option)]
        port = int(listening[0].getsockname()[1])
        make_home(get_settings().home)
        child = _start([listener.fileno() for listener in listening])
    try:
        with announced_gateway(host, port):  # as long as no other process can have the port
            yield gateway_url(host, port)
    finally:
        child.terminate()
        with contextlib.suppress(subprocess.TimeoutExpired):
            child.wait(GRACE_S + 1)
        child.kill()
        child.wait()


def _start(listening: Sequence[int]) -> subprocess.Popen[bytes]:
    child = subprocess.Popen(
        module_command(__name__, str(os.getpid()), *map(str, listening)),
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        pass_fds=listening,
        start_new_session=True,  # Ctrl-C reaches the process that started it alone
    )
    assert child.stdout is not None
    with child.stdout:
        if child.stdout.read(1):
            return child
    child.kill()
    raise ServiceError(f"The gateway ended with the code {child.wait()}.")


def main(argv: Sequence[str]) -> None:
    """Serve on inherited sockets, with PARENT FD..., until the parent ends or a signal comes."""
    parent, *numbers = map(int, argv)
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    end_with_parent(parent)
    forbid_inspection()
    settings = get_settings()
    logs.configure(settings.log_level, settings.log_format)
    listening = [socket.socket(fileno=number) for number in numbers]
    server = BoundedServer(gateway_listener(listening, settings))
    os.write(1, b".")
    server.run()


if __name__ == "__main__":
    main(sys.argv[1:])
