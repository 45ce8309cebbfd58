"""The child of `tcp_port`: passes the bytes of each TCP connection to the embedded Redis's Unix
socket and back.

`main` with PARENT FD...: the process that it ends with, and the listening sockets that it inherits.
Its working directory is the server's folder, so that the path of the socket is short. It writes a
byte to its standard output when it serves.

Only the standard library is imported here, so that a start costs what Python costs.
"""

from __future__ import annotations

import asyncio
import contextlib
import functools
import os
import resource
import signal
import socket
from collections.abc import Sequence
from pathlib import Path

from tuna.sandbox.parent import end_with_parent

#: Relative to the server's folder; the second one where that folder's path is too long for a
#: socket.
SOCKETS = ("redis.sock", "socket/redis.sock")
#: Connections of one port; more are closed at once, so that strangers cannot use up those of the
#: server itself.
MOST_CONNECTIONS = 2000
_BLOCK_BYTES = 1 << 18
#: A peer that vanished without closing is noticed after some two minutes: Redis itself sees the
#: Unix socket alone.
_KEEPALIVE = ((socket.TCP_KEEPIDLE, 60), (socket.TCP_KEEPINTVL, 20), (socket.TCP_KEEPCNT, 3))
_UNSENT_MS = 120_000


def main(argv: list[str]) -> None:
    """Serve until the parent ends, or a signal comes."""
    parent, *numbers = map(int, argv)
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    end_with_parent(parent)
    _, most = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (most, most))
    asyncio.run(_serve([socket.socket(fileno=number) for number in numbers]))


async def _serve(listening: Sequence[socket.socket]) -> None:
    places = asyncio.Semaphore(MOST_CONNECTIONS)
    connected = functools.partial(_connected, places)
    servers = [
        await asyncio.start_server(connected, sock=one, limit=_BLOCK_BYTES) for one in listening
    ]
    os.write(1, b".")
    await asyncio.gather(*(server.serve_forever() for server in servers))


async def _connected(
    places: asyncio.Semaphore, reader: asyncio.StreamReader, writer: asyncio.StreamWriter
) -> None:
    """One client's connection, until either side closes it."""
    with contextlib.closing(writer):
        if places.locked():
            return
        async with places:
            _keep_alive(writer.get_extra_info("socket"))
            with contextlib.suppress(OSError):  # no server at the moment, or the client has gone
                there, here = await _open()
                with contextlib.closing(here):
                    ways = [
                        asyncio.ensure_future(_pass(*way))
                        for way in ((reader, here), (there, writer))
                    ]
                    await asyncio.wait(ways, return_when=asyncio.FIRST_COMPLETED)
                    for way in ways:
                        way.cancel()
                    await asyncio.gather(*ways, return_exceptions=True)


async def _open() -> tuple[asyncio.StreamReader, asyncio.StreamWriter]:
    path = next((path for path in SOCKETS if Path(path).exists()), SOCKETS[0])
    return await asyncio.open_unix_connection(path, limit=_BLOCK_BYTES)


async def _pass(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
    while data := await reader.read(_BLOCK_BYTES):
        writer.write(data)
        await writer.drain()


def _keep_alive(client: socket.socket) -> None:
    client.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
    for option, value in (*_KEEPALIVE, (socket.TCP_USER_TIMEOUT, _UNSENT_MS)):
        client.setsockopt(socket.IPPROTO_TCP, option, value)
