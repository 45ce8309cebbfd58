"""TCP ports to the embedded Redis, for workers on other machines that join with a token.

The server itself listens on its Unix socket alone: it has one port at most, and several masters of
one TUNA_HOME have one each. A child (`tcp_port_child`) passes connections on, and ends with the
process that opened the port, however that ends. A client has to authenticate as with any Redis: as
the user of a token or of a member (`membership.access`).

`run/port-HOST-PORT` is locked (flock) by the child for life, so that a client of this user knows
whose port it is.
"""

from __future__ import annotations

import contextlib
import errno
import fcntl
import os
import socket
import subprocess
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any
from urllib.parse import quote, unquote

from tuna.errors import BadInput, ServiceError
from tuna.membership import tcp_port_child
from tuna.sandbox.python import bare_command
from tuna.services.embedded_redis import EmbeddedRedis, private_folder

_BACKLOG = 128
_PREFIX = "port-"


@contextlib.contextmanager
def open_port(server: EmbeddedRedis, host: str, port: int) -> Iterator[int]:
    """Pass connections to HOST:PORT on to the embedded Redis while the block runs, which starts it;
    yields the port.

    `port`: 0 for any. Raises BadInput if the address cannot be had, before anything is written;
    ServiceError if the server that runs is one of an older version, without a password.
    """
    with contextlib.ExitStack() as stack:
        listening = [stack.enter_context(one) for one in _listen(host, port)]
        port = int(listening[0].getsockname()[1])
        server.acquire()
        _has_password(server)
        claim = _claim(server.run_dir, host, port)
        try:
            child = _start(server.run_dir, [one.fileno() for one in listening], claim)
        finally:
            os.close(claim)  # the child's alone
        stack.close()
        try:
            yield port
        finally:
            # while no other process can have the port
            _file(server.run_dir, host, port).unlink(missing_ok=True)
            child.kill()
            child.wait()


def open_ports(run_dir: Path) -> list[tuple[str, int]]:
    """Host and port of those that are open now to the server of `run_dir`."""
    found = []
    for path in sorted(run_dir.glob(f"{_PREFIX}*")):
        host, _, port = path.name.removeprefix(_PREFIX).rpartition("-")
        with contextlib.suppress(OSError), path.open("rb") as file:
            try:
                fcntl.flock(file, fcntl.LOCK_SH | fcntl.LOCK_NB)
            except BlockingIOError:
                found.append((unquote(host), int(port)))
    return found


def _listen(host: str, port: int) -> list[socket.socket]:
    """Sockets that listen on each address of `host`; their port is taken from here on."""
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
            one.listen(_BACKLOG)
    except (OSError, UnicodeError, OverflowError) as error:
        for one in made:
            one.close()
        raise _unusable(host, port, error) from None
    return made


def _unusable(host: str, port: int, error: Exception) -> BadInput:
    if isinstance(error, OSError) and error.errno == errno.EADDRINUSE:
        return BadInput(
            f"Port {port} of {host} is in use.",
            hint="choose another one with --port, or end what listens there",
        )
    why = error.strerror if isinstance(error, OSError) else str(error)
    return BadInput(
        f"Port {port} of {host} cannot be listened on: {why}.",
        hint="choose another with --port or --listen",
    )


def _has_password(server: EmbeddedRedis) -> None:
    with contextlib.closing(server.client()) as client:
        rights: Any = client.acl_getuser("default")
        if "nopass" in rights["flags"]:
            raise ServiceError(
                "The embedded Redis that runs was started by an older version, without a password.",
                hint=(
                    "end the commands and workers that use it, then it is replaced: see `tuna"
                    " workers`"
                ),
            )


def _file(run_dir: Path, host: str, port: int) -> Path:
    return run_dir / f"{_PREFIX}{quote(host, safe='')}-{port}"


def _claim(run_dir: Path, host: str, port: int) -> int:
    private_folder(run_dir)
    file = os.open(_file(run_dir, host, port), os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
    fcntl.flock(file, fcntl.LOCK_EX)  # the port is ours: a process that has it is about to end
    return file


def _start(run_dir: Path, listening: Sequence[int], claim: int) -> subprocess.Popen[bytes]:
    child = subprocess.Popen(
        bare_command(tcp_port_child.__name__, str(os.getpid()), *map(str, listening)),
        env={name: os.environ[name] for name in ("PATH", "LD_LIBRARY_PATH") if name in os.environ},
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=subprocess.DEVNULL,
        cwd=run_dir,
        pass_fds=[*listening, claim],
        start_new_session=True,  # Ctrl-C reaches the process that opened the port alone
    )
    assert child.stdout is not None
    with child.stdout:
        if child.stdout.read(1):
            return child
    child.kill()
    raise ServiceError(
        f"The process that passes connections on ended with the code {child.wait()}."
    )
