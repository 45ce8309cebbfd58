"""TVM's own RPC tracker and servers on loopback, and what is no board though a tracker names it."""

from __future__ import annotations

import contextlib
import json
import os
import socket
import struct
import threading
from collections.abc import Iterator
from importlib.util import find_spec
from typing import Any

import psutil
from private_servers import wait_until
from shared_data import need
from tvm import rpc

from tuna.libraries.tvm.boards import Tracker

#: Ports of this process and its neighbours; a server takes the next free one.
_PORTS = 20000 + os.getpid() % 400 * 50
_MAGIC = struct.pack("<i", 0x2F271)
_START_S = 60.0
#: It says no to a client of another key once the session before has ended.
_ANSWER_S = 3.0
_servers: dict[str, Any] = {}


@contextlib.contextmanager
def server(**options: Any) -> Iterator[Any]:
    """A server of one session at a time."""
    need(find_spec("cloudpickle"), "cloudpickle (pip install '.[rpc]')")
    found = rpc.Server("127.0.0.1", port=_PORTS, port_end=_PORTS + 400, silent=True, **options)
    try:
        yield found
    finally:
        found.terminate()


def answers(port: int) -> bool:
    """Whether the server there still accepts sessions: one of TVM's ends for good with a session
    that ends badly."""
    key = b"client:of nobody"
    try:
        with socket.create_connection(("127.0.0.1", port), _ANSWER_S) as asked:
            asked.settimeout(_ANSWER_S)
            asked.sendall(struct.pack("<ii", rpc.base.RPC_MAGIC, len(key)) + key)
            return len(asked.recv(4)) == 4
    except OSError:
        return False


@contextlib.contextmanager
def board(key: str, emulator: str = "") -> Iterator[Tracker]:
    """A tracker that has one board with this device key, which says that it is emulated if
    `emulator` is given."""
    need(find_spec("tornado"), "tornado (pip install '.[rpc]')")
    from tvm.rpc.tracker import Tracker as TvmTracker

    running = TvmTracker("127.0.0.1", port=_PORTS, port_end=_PORTS + 400, silent=True)
    try:
        tracker = Tracker("127.0.0.1", int(running.port))

        def say() -> None:  # here, so that the server's process gets its code
            import tvm_ffi

            tvm_ffi.register_global_func("tuna.emulator", lambda: emulator)

        says = say if emulator else None
        with server(
            tracker_addr=(tracker.host, tracker.port), key=key, server_init_callback=says
        ) as _servers[key]:
            wait_until(lambda: key in tracker.boards(_START_S), _START_S)
            yield tracker
    finally:
        running.terminate()


def kill(key: str) -> None:
    """Kill the board with this key, and its session, as a power cut does."""
    server = psutil.Process(_servers[key].proc._proc.pid)
    for one in (*server.children(recursive=True), server):
        one.kill()


@contextlib.contextmanager
def silent_board(key: str, answer: bytes = b"") -> Iterator[Tracker]:
    """A tracker whose only board accepts connections, and says nothing or `answer`."""
    with (
        socket.create_server(("127.0.0.1", 0)) as silent,
        socket.create_server(("127.0.0.1", 0)) as listener,
    ):
        place = ["127.0.0.1", silent.getsockname()[1], f"{key}:0.5"]
        answers = {6: {"server_info": [{"key": f"server:{key}"}]}, 4: place}

        def serve() -> None:
            with contextlib.suppress(OSError):
                while True:
                    client, _ = listener.accept()
                    with client:
                        client.recv(4, socket.MSG_WAITALL)
                        client.sendall(_MAGIC)
                        (size,) = struct.unpack("<i", client.recv(4, socket.MSG_WAITALL))
                        code, *_ = json.loads(client.recv(size, socket.MSG_WAITALL))
                        text = json.dumps([0, answers[code]]).encode()
                        client.sendall(struct.pack("<i", len(text)) + text)

        def say() -> None:
            with contextlib.suppress(OSError):
                client, _ = silent.accept()
                with client:
                    client.sendall(answer)
                    while client.recv(4096):
                        pass

        threading.Thread(target=serve, daemon=True).start()
        if answer:
            threading.Thread(target=say, daemon=True).start()
        yield Tracker("127.0.0.1", listener.getsockname()[1])
