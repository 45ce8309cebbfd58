"""Boards behind TVM's RPC: the tracker that lists them, asked with a deadline. No TVM here.

TVM's own client waits for a tracker without limit. Its protocol is small (tvm/rpc/base.py): both
sides send a magic number, then messages of a length of 4 bytes and JSON, each of which is answered.
"""

from __future__ import annotations

import contextlib
import json
import re
import socket
import struct
import time
from collections import Counter
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any

from tuna.common.messages import choices
from tuna.errors import BadInput, NotFound, ServiceError

_MAGIC = struct.pack("<i", 0x2F271)
_REQUEST, _SUMMARY = 4, 6
_SUCCESS = 0
#: Seconds between two questions whether a board is free
_POLL_S = 0.2
#: Maximum of bytes of a tracker's answer
_MAX_ANSWER_BYTES = 1 << 20


@dataclass(frozen=True)
class BoardAddress:
    """Address of a board that a tracker gave away: the match key admits one client, once."""

    host: str
    port: int
    match_key: str


@dataclass(frozen=True)
class Tracker:
    """The address of a tracker."""

    host: str
    port: int

    @classmethod
    def parse(cls, text: str) -> Tracker:
        """Read `HOST:PORT` or `[::1]:PORT`; raises BadInput."""
        host, _, port = text.rpartition(":")
        host = host.removeprefix("[").removesuffix("]")
        number = int(port) if re.fullmatch("[0-9]{1,5}", port) else 0
        if not host or not 0 < number < 1 << 16:
            raise BadInput(f"{text!r} is not of the form HOST:PORT.")
        return cls(host, number)

    def __str__(self) -> str:
        return f"[{self.host}]:{self.port}" if ":" in self.host else f"{self.host}:{self.port}"

    def boards(self, timeout_s: float) -> Mapping[str, int]:
        """Return the number of boards that are registered with each device key, free or not; raises
        ServiceError.

        A board that vanished without closing its connection is still among them.
        """
        with self._expected():
            servers = self._ask([_SUMMARY], timeout_s)["server_info"]
            return Counter(str(entry["key"]).removeprefix("server:") for entry in servers)

    def queue(self, key: str, timeout_s: float) -> tuple[int, int]:
        """Return the number of free boards with this device key, and of requests that wait for one;
        raises ServiceError."""
        with self._expected():
            queues = self._ask([_SUMMARY], timeout_s)["queue_info"]
            found = queues.get(key, {"free": 0, "pending": 0})
            return int(found["free"]), int(found["pending"])

    def await_board(self, key: str, wait_s: float) -> None:
        """Wait for a free board with this device key; raises NotFound if there is none at all,
        ServiceError if none becomes free or the tracker does not answer."""
        deadline = time.monotonic() + wait_s
        boards = self.boards(wait_s)
        if key not in boards:
            raise NotFound(
                f"The tracker {self} has no board with the device key {key!r}.",
                hint=(
                    f"{choices(key, boards, 'device keys')}; start one: `python -m"
                    f" tvm.exec.rpc_server --tracker={self} --key={key}`"
                ),
            )
        while not self.queue(key, wait_s)[0]:
            if time.monotonic() > deadline:
                raise _held(key, wait_s)
            time.sleep(_POLL_S)

    def request(self, key: str, timeout_s: float) -> BoardAddress:
        """A free board with this device key; the caller's until its session ends. Raises
        ServiceError."""
        with self._expected():
            host, port, match_key = self._ask([_REQUEST, key, "", 1], timeout_s, waits_for=key)
            return BoardAddress(str(host), int(port), str(match_key))

    def _ask(self, message: list[Any], timeout_s: float, *, waits_for: str = "") -> Any:
        deadline = time.monotonic() + timeout_s
        answered = False
        try:
            with socket.create_connection((self.host, self.port), timeout_s) as connection:
                connection.sendall(_MAGIC)
                if _received(connection, len(_MAGIC), deadline) != _MAGIC:
                    raise self._is_none()
                answered = True
                text = json.dumps(message).encode()
                connection.sendall(struct.pack("<i", len(text)) + text)
                (size,) = struct.unpack("<i", _received(connection, 4, deadline))
                if not 0 < size <= _MAX_ANSWER_BYTES:
                    raise self._is_none()
                status, *rest = json.loads(_received(connection, size, deadline))
        except TimeoutError:
            if answered and waits_for:
                raise _held(waits_for, timeout_s) from None
            raise ServiceError(
                f"The tracker {self} does not answer within {timeout_s:g} s."
            ) from None
        except OSError as error:
            raise ServiceError(
                f"The tracker {self} cannot be reached: {error.strerror or error}.",
                hint="start one: `python -m tvm.exec.rpc_tracker --host=0.0.0.0 --port=9190`",
            ) from error
        except (ValueError, TypeError, RecursionError, struct.error):
            raise self._is_none() from None
        if status != _SUCCESS or not rest:
            raise ServiceError(f"The tracker {self} refused the request.")
        return rest[0]

    @contextlib.contextmanager
    def _expected(self) -> Iterator[None]:
        """Raise ServiceError for an answer of another form than is read."""
        try:
            yield
        except (AttributeError, KeyError, TypeError, ValueError):
            raise self._is_none() from None

    def _is_none(self) -> ServiceError:
        return ServiceError(f"{self} does not answer as a TVM RPC tracker does.")


def _held(key: str, wait_s: float) -> ServiceError:
    return ServiceError(
        f"No board with the device key {key!r} became free within {wait_s:g} s.",
        hint="another client holds it, or it vanished; see `python -m tvm.exec.query_rpc_tracker`",
    )


def _received(connection: socket.socket, size: int, deadline: float) -> bytes:
    """Receive exactly `size` bytes; raises OSError, TimeoutError included."""
    found = b""
    while len(found) < size:
        left_s = deadline - time.monotonic()
        if left_s <= 0:
            raise TimeoutError
        connection.settimeout(left_s)
        chunk = connection.recv(size - len(found))
        if not chunk:
            raise ConnectionResetError("it closed the connection")
        found += chunk
    return found
