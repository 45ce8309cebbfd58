"""Ports that gateways of one TUNA_HOME listen on.

`run/gateway-HOST-PORT` is locked (flock) by the process for life, so that commands of this user
know where a gateway listens.
"""

from __future__ import annotations

import contextlib
import errno
import fcntl
import ipaddress
import os
import socket
from pathlib import Path
from urllib.parse import quote, unquote

from tuna.errors import BadInput
from tuna.files import own_folder

#: Default port of `tuna gateway`.
GATEWAY_PORT = 7117
_PREFIX = "gateway-"
#: Connections that wait to be accepted: of a cluster whose programs start at the same moment.
BACKLOG = 1024


def gateway_url(host: str, port: int) -> str:
    """The address by which others reach a gateway; one on all addresses by this machine's name."""
    with contextlib.suppress(ValueError):  # a name
        if ipaddress.ip_address(host).is_unspecified:
            host = socket.getfqdn()
    return f"https://[{host}]:{port}" if ":" in host else f"https://{host}:{port}"


def open_gateways(run_dir: Path) -> list[tuple[str, int]]:
    """Host and port of the gateways of this TUNA_HOME that listen now."""
    found = []
    for path in sorted(run_dir.glob(f"{_PREFIX}*")):
        host, _, port = path.name.removeprefix(_PREFIX).rpartition("-")
        with contextlib.suppress(OSError), path.open("rb") as file:
            try:
                fcntl.flock(file, fcntl.LOCK_SH | fcntl.LOCK_NB)
            except BlockingIOError:
                found.append((unquote(host), int(port)))
    return found


def listen(host: str, port: int) -> list[socket.socket]:
    """Sockets that listen on each address of `host`; their port is taken from here on. Raises
    BadInput."""
    made: list[socket.socket] = []
    try:
        for family, kind, protocol, _, address in socket.getaddrinfo(
            host, port, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE
        ):
            one = socket.socket(family, kind, protocol)
            made.append(one)
            one.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            if family == socket.AF_INET6:
                one.setsockopt(socket.IPPROTO_IPV6, socket.IPV6_V6ONLY, 1)
            one.bind((address[0], port or made[0].getsockname()[1], *address[2:]))
            one.listen(BACKLOG)
    except (OSError, UnicodeError, OverflowError) as error:
        for one in made:
            one.close()
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


def claim_file(run_dir: Path, host: str, port: int) -> Path:
    return run_dir / f"{_PREFIX}{quote(host, safe='')}-{port}"


def claim_port(run_dir: Path, host: str, port: int) -> int:
    """Lock the file of a port that this process has; returns its descriptor."""
    own_folder(run_dir)
    file = os.open(claim_file(run_dir, host, port), os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
    fcntl.flock(file, fcntl.LOCK_EX)  # the port is ours: a process that has it is about to end
    return file
