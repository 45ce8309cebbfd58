"""Sockets that listen, for servers of Starlette and uvicorn, and where a service is reached.

`run/NAME-PORT.url` is locked (flock) by a service for life, so that commands of this user know its
address.
"""

from __future__ import annotations

import contextlib
import errno
import fcntl
import socket
from collections.abc import Iterator
from importlib.util import find_spec
from pathlib import Path

from tuna.common.files import own_folder
from tuna.common.messages import install_extra
from tuna.errors import BadInput, TunaError

#: Maximum of connections that wait to be accepted, of a cluster whose programs start at the same
#: moment
BACKLOG = 1024


def require_packages_of_server() -> None:
    """Raise TunaError where the packages of a gateway are not installed."""
    if not (find_spec("uvicorn") and find_spec("starlette")):
        raise TunaError("A gateway needs Starlette and uvicorn.", hint=install_extra("serve"))


@contextlib.contextmanager
def announced(run_dir: Path, name: str, port: int, url: str) -> Iterator[None]:
    """Write down, while the block runs, that a service on a port of this process has this URL."""
    path = own_folder(run_dir) / f"{name}-{port}.url"
    with path.open("w") as file:
        fcntl.flock(file, fcntl.LOCK_EX)
        file.write(url)
        file.flush()
        try:
            yield
        finally:
            path.unlink(missing_ok=True)


def announced_urls(run_dir: Path, name: str) -> list[str]:
    """Return the URLs of the services of this name that run with this TUNA_HOME."""
    urls: list[str] = []
    for path in sorted(run_dir.glob(f"{name}-*.url")):
        with contextlib.suppress(OSError), path.open() as file:
            try:
                fcntl.flock(file, fcntl.LOCK_SH | fcntl.LOCK_NB)
            except BlockingIOError:
                urls += filter(None, [file.read()])
    return urls


def listen(host: str, port: int, option: str = "--port") -> list[socket.socket]:
    """Sockets that listen on each address of `host`; their port is taken from here on. Raises
    BadInput, whose hint names the option of the command that sets the port."""
    made: list[socket.socket] = []
    try:
        for family, kind, protocol, _, address in socket.getaddrinfo(
            host, port, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE
        ):
            listener = socket.socket(family, kind, protocol)
            made.append(listener)
            listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            if family == socket.AF_INET6:
                listener.setsockopt(socket.IPPROTO_IPV6, socket.IPV6_V6ONLY, 1)
            listener.bind((address[0], port or made[0].getsockname()[1], *address[2:]))
            listener.listen(BACKLOG)
    except (OSError, UnicodeError, OverflowError) as error:
        for listener in made:
            listener.close()
        if isinstance(error, OSError) and error.errno == errno.EADDRINUSE:
            raise BadInput(
                f"Port {port} of {host} is in use.",
                hint=f"choose another one with {option}, or end what listens there",
            ) from None
        why = error.strerror if isinstance(error, OSError) else str(error)
        raise BadInput(
            f"Port {port} of {host} cannot be listened on: {why}.",
            hint=f"choose another with {' or '.join(dict.fromkeys((option, '--listen')))}",
        ) from None
    return made
