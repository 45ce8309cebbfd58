"""A board on loopback: a server of TVM's RPC behind a tracker that says what a test wants."""

from __future__ import annotations

import contextlib
import json
import os
import signal
import socket
import struct
import subprocess
import sys
import threading
import time

_SUMMARY = 6
#: A server that starts again when a candidate has crashed it, as docs/boards.md has it.
_SERVER = """
import os
import sys
import tvm_ffi
from tvm.rpc import server
if sys.argv[2]:
    tvm_ffi.register_global_func("tuna.emulator", lambda: sys.argv[2])
while True:
    serving = os.fork()
    if not serving:
        port = int(sys.argv[1])
        state = server.PopenRPCServerState("127.0.0.1", port, port + 1, key="board", silent=True)
        state.thread.join()
        os._exit(1)
    os.waitpid(serving, 0)
"""


class Board:
    """A server in a process group of its own."""

    def __init__(self, emulator: str = "") -> None:
        with socket.socket() as free:
            free.bind(("127.0.0.1", 0))
            self.port = free.getsockname()[1]
        command = [sys.executable, "-c", _SERVER, str(self.port), emulator]
        self.process = subprocess.Popen(
            command, start_new_session=True, env={**os.environ, "TVM_NUM_THREADS": "1"}
        )
        deadline = time.monotonic() + 60
        while True:
            try:
                socket.create_connection(("127.0.0.1", self.port), 1).close()
                return
            except OSError:
                assert time.monotonic() < deadline
                time.sleep(0.1)

    def kill(self) -> None:
        with contextlib.suppress(ProcessLookupError):
            os.killpg(self.process.pid, signal.SIGKILL)
        self.process.wait()


class Tracker:
    """Gives every client the board at one port; without a port it says nothing after its
    greeting."""

    def __init__(self, port: int | None) -> None:
        self.port = port
        self.free = 0  #: boards, by its summary
        self.given = 0
        self._listener = socket.create_server(("127.0.0.1", 0))
        self.address = f"127.0.0.1:{self._listener.getsockname()[1]}"
        threading.Thread(target=self._serve, daemon=True).start()

    def _serve(self) -> None:
        with contextlib.suppress(OSError):
            while True:
                client, _ = self._listener.accept()
                threading.Thread(target=self._answer, args=(client,), daemon=True).start()

    def _answer(self, client: socket.socket) -> None:
        with client, contextlib.suppress(OSError):
            client.sendall(client.recv(4))
            asked = json.loads(client.recv(4096)[4:])
            if asked[0] == _SUMMARY:
                self._say(
                    client,
                    {"queue_info": {"pi": {"free": self.free, "pending": 0}}, "server_info": []},
                )
            elif self.port is not None:
                self.given += 1
                self._say(client, ["127.0.0.1", self.port, "board"])
            client.recv(4096)

    def _say(self, client: socket.socket, answer: object) -> None:
        text = json.dumps([0, answer]).encode()
        client.sendall(struct.pack("<i", len(text)) + text)

    def close(self) -> None:
        self._listener.close()
