"""Sockets that listen, for servers of Starlette and uvicorn."""

from __future__ import annotations

import errno
import socket
from importlib.util import find_spec

from tuna.common.messages import install_extra
from tuna.errors import BadInput, TunaError

#: Maximum of connections that wait to be accepted, of a cluster whose programs start at the same
#: moment
BACKLOG = 1024


def require_packages_of_server() -> None:
    """Raise TunaError where the packages of a gateway are not installed."""
    if not (find_spec("uvicorn") and find_spec("starlette")):
        raise TunaError("A gateway needs Starlette and uvicorn.", hint=install_extra("serve"))


def listen(host: str, port: int) -> list[socket.socket]:
    """Sockets that listen on each address of `host`; their port is taken from here on. Raises
    BadInput."""
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
                hint="choose another one with --port, or end what listens there",
            ) from None
        why = error.strerror if isinstance(error, OSError) else str(error)
        raise BadInput(
            f"Port {port} of {host} cannot be listened on: {why}.",
            hint="choose another with --port or --listen",
        ) from None
    return made
