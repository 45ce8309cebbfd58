"""Boards of one tracker and device key: a free one, what it says of itself, and the environment
that this makes. No TVM here."""

from __future__ import annotations

import contextlib
import socket
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

from tuna.errors import BadInput, LibraryMissing, ServiceError
from tuna.libraries.base import Environment
from tuna.libraries.measurement import DeviceGone
from tuna.libraries.tvm import toolchain
from tuna.libraries.tvm.boards import BoardAddress, Tracker
from tuna.sandbox.box import Box
from tuna.sandbox.processes import Child, ChildCancelled, ChildFault, child_env

#: Module of the child that speaks with a board.
CHILD = "tuna_remote.board_child"
#: Seconds for a child's start, which imports TVM, and for the handshake with a board.
START_S, HANDSHAKE_S = 120.0, 20.0
#: Seconds that a starting worker, or a new session, waits for a free board.
_FIRST_WAIT_S = 30.0
_CONNECT_S = 3.0
#: Timeout of one request to the tracker, which bounds the wait of a worker that ends; and the pause
#: between two.
_SLICE_S, _PAUSE_S = 2.0, 0.2
#: Prefix of the child's error where the board itself failed.
_LOST = "BoardLost: "


@dataclass(frozen=True)
class BoardPool:
    """The boards of a tracker with one device key."""

    tracker: Tracker
    key: str

    @classmethod
    def at(cls, address: str, key: str) -> BoardPool:
        """Return the pool of a tracker at HOST:PORT; raises BadInput."""
        if not address or not key:
            raise BadInput(
                "A board is named by its tracker and its key.",
                hint="give --tvm-tracker and --device-key",
            )
        return cls(Tracker.parse(address), key)

    def __str__(self) -> str:
        return f"{self.key}@{self.tracker}"

    def all_held(self) -> bool:
        """Whether none is free and no client waits for one: then a client that leaves one gets the
        same one again."""
        try:
            return self.tracker.queue(self.key, _CONNECT_S) == (0, 0)
        except ServiceError:
            return False

    def free(self, wait_s: float, ending: Callable[[], bool] = lambda: False) -> BoardAddress:
        """A free one; raises DeviceGone where there is none within `wait_s`, or before when this
        process is `ending`."""
        deadline = time.monotonic() + wait_s
        while True:
            left_s = deadline - time.monotonic()
            try:
                return self.tracker.request(self.key, min(_SLICE_S, max(left_s, 0.1)))
            except ServiceError as error:
                if ending():
                    raise DeviceGone("this worker is ending") from None
                # no tracker listens there
                if left_s <= _SLICE_S or isinstance(error.__cause__, OSError):
                    raise DeviceGone(str(error)) from error
                time.sleep(_PAUSE_S)


def open_request(place: BoardAddress, session_s: float) -> dict[str, Any]:
    """The request that makes a child open a session there, which the board's server ends after
    `session_s`."""
    found = {"host": place.host, "port": place.port, "match_key": place.match_key}
    return {"op": "open", **found, "session_s": session_s}


def environment_of(
    facts: Mapping[str, Any], target: Mapping[str, Any] | None, key: str
) -> Environment:
    """The environment of a board by what it says of itself, for a target; None: the board's own.

    Raises BadInput for a target that the board cannot run, and without one for a board that does
    not say what its CPU is.
    """
    target = target or _own_target(facts, key)
    flags = {"device_key": key, "cpu": str(facts["cpu"]), "runtime": f"llvm-{facts['llvm']}"}
    if facts["emulator"]:
        flags["emulator"] = str(facts["emulator"])
    architecture = toolchain.architecture(
        {"mtriple": facts["triple"]} if facts["triple"] else target
    )
    if toolchain.architecture(target) != architecture:
        raise BadInput(
            f"Boards with the key {key} are {architecture}, and the target is for"
            f" {toolchain.architecture(target)}.",
            hint=toolchain.EXAMPLE,
        )
    return Environment(
        library="tvm",
        library_version=toolchain.tvm_version(),
        arch=str(target.get("mcpu") or architecture),
        num_cu=int(target.get("num-cores") or facts["threads"]),
        toolchain=toolchain.toolchain_of(),
        device=_device(facts, key, architecture),
        target=toolchain.to_text(target),
        flags=flags,
    )


def _device(facts: Mapping[str, Any], key: str, architecture: str) -> str:
    name = str(facts["model"] or f"{key} ({facts['cpu'] or architecture})")
    return f"{name}, emulated by {facts['emulator']}" if facts["emulator"] else name


def _own_target(facts: Mapping[str, Any], key: str) -> dict[str, Any]:
    if not facts["triple"]:  # its runtime has no compiler to ask
        text = f"The board with the key {key} does not say what its CPU is."
        raise BadInput(text, hint=f"give its target with --target, {toolchain.EXAMPLE}")
    target = {"kind": "llvm", "num-cores": int(facts["threads"])}
    target["mtriple"] = toolchain.triple({"mtriple": facts["triple"]})
    if facts["cpu"] and facts["cpu"] != "generic":
        target["mcpu"] = str(facts["cpu"])
    return target


def ask(boards: BoardPool, ending: Callable[[], bool] = lambda: False) -> dict[str, Any]:
    """Return the facts that a free board reports; raises LibraryMissing where there is none."""
    child = Child(CHILD, env=child_env({"TVM_NUM_THREADS": "1"}), box=Box(network=True))
    try:
        # its start: a board that was given does not wait so long
        child.call({"op": "close"}, START_S, ending)
        request = open_request(boards.free(_FIRST_WAIT_S, ending), _FIRST_WAIT_S)
        return child.call(request, HANDSHAKE_S, ending)
    except (ChildFault, ChildCancelled, DeviceGone) as error:
        text = f"No board with the key {boards.key} can be used: {words(error)}"
        hint = (
            "see what the tracker has: python -m tvm.exec.query_rpc_tracker --host"
            f" {boards.tracker.host}"
        )
        raise LibraryMissing(text, hint=f"{hint} --port {boards.tracker.port}") from error
    finally:
        child.close()


def listens(board: str, wait_s: float) -> bool:
    """Whether the board's server serves within `wait_s`: it refuses this connection for its first
    word, or is busy and keeps it.

    The system takes connections for a server that is about to end, and resets them when it has; so
    an answer is awaited. A server that a candidate crashed is started again by its board, which
    takes moments.
    """
    deadline = time.monotonic() + wait_s
    while True:
        try:
            where = Tracker.parse(board)
            with socket.create_connection((where.host, where.port), _CONNECT_S) as connection:
                connection.sendall(bytes(4))
                with contextlib.suppress(TimeoutError):
                    connection.recv(1)
            return True
        except BadInput:
            return False
        except OSError:
            if time.monotonic() > deadline:
                return False
            time.sleep(_PAUSE_S)


def words(error: Exception) -> str:
    """Return the error's text without the name of the child's exception."""
    text = str(error)
    return text.partition(_LOST)[2] or text
