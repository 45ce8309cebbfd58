"""TVM on boards behind its RPC: a free board of a tracker, what it says of itself, and the session
on it that measures. No TVM here.

What speaks with a board is a child that is killed when it takes too long; a chunk has one session
on one board. A candidate that crashed or hung differs from a board that vanished in that the
board's server still takes connections.
"""

from __future__ import annotations

import contextlib
import os
import socket
import time
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, replace
from typing import Any

from tuna.errors import BadInput, LibraryMissing, ServiceError
from tuna.libraries.base import Environment
from tuna.libraries.boards import BoardProcesses, Boards, WorkerBoards, board_settings
from tuna.libraries.candidate_children import ChildKind
from tuna.libraries.context import DeviceHandle, RunContext
from tuna.libraries.measurement import DeviceGone, DeviceHeld
from tuna.libraries.tvm import toolchain
from tuna.libraries.tvm.boards import BoardAddress, Tracker
from tuna.sandbox.box import Box
from tuna.sandbox.processes import Child, ChildCancelled, ChildFailed, ChildFault, child_env

#: Module of the child that speaks with a board.
CHILD = "tuna_remote.board_child"
#: Seconds for a child's start, which imports TVM, and for the handshake with a board.
START_S, HANDSHAKE_S = 120.0, 20.0
#: Seconds to wait for a free board at the start of a worker or a session, at the start of a chunk,
#: and once more if that failed.
_FIRST_WAIT_S, _WAIT_S, _AGAIN_S = 30.0, 20.0, 10.0
#: Seconds until the server of a board has restarted after a crash.
_BACK_S = 3.0
#: A board's server ends a session by itself this long after the last item could have ended, should
#: we not.
_MARGIN_S = 60.0
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


class BoardSession(BoardProcesses):
    """The child that has a session on one board for a chunk; no candidate runs in the child itself,
    and the board serves each session in a new process."""

    def __init__(self, kind: ChildKind, boards: BoardPool) -> None:
        """`kind`: of the library's processes on this machine."""
        super().__init__(replace(kind, module=CHILD, used=f"{CHILD}:BoardLoader", remote=True))
        self._boards = boards
        self._own: Environment | None = None  #: environment of the first board
        self._child: Child | None = None
        self._board = ""  #: address of the board that has our session; empty: none is open
        self._gone = ""  #: reason why the rest of the item has no board; empty: it has
        self._ends_at = 0.0  #: moment when the chunk's time is over, by `time.monotonic`

    def environment(self) -> Environment:
        """Return that of a board, which is asked once."""
        if self._own is None:
            text = board_settings().tvm_target
            target = toolchain.parse(text) if text else None
            self._own = environment_of(ask(self._boards), target, self._boards.key)
        return self._own

    def own_device(self) -> DeviceHandle:
        """Return a handle of whichever board the tracker gives this process."""
        return DeviceHandle(f"{self._boards}#{os.getpid()}")

    @property
    def simulated(self) -> bool:
        """Whether the board is emulated."""
        return "emulator" in self.environment().flags

    def probe(self, device: DeviceHandle) -> str:
        """Whether a board answers: the one of the open session, else a free one."""
        try:
            if self._board and self._child is not None and self._child.alive:
                self._child.call({"op": "ping"}, HANDSHAKE_S)
            else:
                self.compare(ask(self._boards))
        except (ChildFault, LibraryMissing, DeviceGone) as error:
            return words(error)
        return ""

    @contextlib.contextmanager
    def chunk(self, context: RunContext, limit_s: float) -> Iterator[None]:
        """Give the board to others at the end of the block."""
        self._ends_at = time.monotonic() + limit_s + _MARGIN_S
        try:
            yield
        finally:
            self._leave()
            context.uses("")

    def begin_item(self, context: RunContext, *, finals: bool) -> None:
        """Open a session unless the chunk has one; raises DeviceGone."""
        self._gone = ""
        if not self._board:
            self._open(context, _WAIT_S)
        super().begin_item(context, finals=finals)

    def clean(self, op: str, timeout_s: float, **arguments: Any) -> dict[str, Any]:
        """Call the child; after a fault there is a new session, or DeviceGone."""
        if self._gone:
            raise self._without_board(op)
        try:
            return self.call(self._started(self.context), op, timeout_s, **arguments)
        except ChildFault as fault:
            self._after(fault)
            raise

    def shared(self, op: str, timeout_s: float, **arguments: Any) -> dict[str, Any]:
        """Call the child, as `clean` does."""
        return self.clean(op, timeout_s, **arguments)

    def fresh(self, op: str, timeout_s: float, **arguments: Any) -> dict[str, Any]:
        """Call in a new session; in the open one if a new one may be on another board."""
        if self._board and not self.context.ending() and self._boards.all_held():
            board = self._board
            self._leave()
            self._reopen(board)
            if (other := self._board) not in ("", board):
                self._gone = f"not measured: {other} was given instead of the board {board}"
        return self.clean(op, timeout_s, **arguments)

    def end_item(self) -> None:
        """Do nothing: a session is for all items of a chunk."""

    def warm_up(self, context: RunContext) -> None:
        """Start the child."""
        self._started(context).start()

    def close(self) -> None:
        """End the child, and with it the session."""
        self._board = ""
        if self._child is not None:
            self._child.close()
            self._child = None

    def compare(self, facts: Mapping[str, Any]) -> None:
        """Raise DeviceGone for a board that is not of this environment, by what it says of
        itself."""
        wanted = self.environment()
        here = environment_of(facts, toolchain.parse(wanted.target), self._boards.key)
        if here.machine_key != wanted.machine_key:
            pairs = ((name, getattr(here, name)) for name in ("device", "arch", "num_cu", "flags"))
            other = [f"{name} {own}" for name, own in pairs if own != getattr(wanted, name)]
            raise DeviceGone(
                f"the board {facts['board']} is another than the session's: {', '.join(other)}"
            )

    def _started(self, context: RunContext) -> Child:
        self._child = self._child or self.new_child(context)
        return self._child

    def _open(self, context: RunContext, wait_s: float) -> None:
        """Open a session within `wait_s` for a free board; raises DeviceGone, also for a board of
        another kind."""
        child, waits = self._started(context), lambda: context.cancelled() or context.ending()
        try:
            if not child.alive:
                # its start, before a board waits for it
                child.call({"op": "close"}, START_S, waits)
            place = self._boards.free(wait_s, waits)
            left_s = max(_MARGIN_S, self._ends_at - time.monotonic())
            facts = child.call(open_request(place, left_s), HANDSHAKE_S, waits)
        except ChildCancelled:
            if context.cancelled():
                raise
            raise DeviceGone("this worker is ending") from None
        except ChildFault as error:
            raise DeviceGone(words(error)) from error
        self.compare(facts)
        self._board = str(facts["board"])
        context.uses(f"{self._boards.key} at {self._board}")

    def _leave(self) -> None:
        """Give the board to others; the child stays."""
        self._board = ""
        if self._child is not None and self._child.alive:
            with contextlib.suppress(ChildFault):
                self._child.call({"op": "close"}, HANDSHAKE_S)

    def _after(self, fault: Exception) -> None:
        """Open a new session after `fault`; raises DeviceGone unless it was what we measure that
        failed, and not the board."""
        board = self._board
        self._leave()
        if not listens(board, _BACK_S):
            raise DeviceGone(f"the board {board} vanished: {words(fault)}") from fault
        self._reopen(board)

    def _reopen(self, board: str) -> None:
        """Open a session after the one on `board`; if there is none, that is why candidates cannot
        be measured."""
        try:
            self._open(self.context, _AGAIN_S)
        except DeviceGone as gone:
            why = f"the board {board} did not come back after the candidate before"
            self._gone = f"not measured: {why}: {gone}"

    def _without_board(self, op: str) -> Exception:
        """A candidate fails whose turn is yet to come; those that were measured stay as they are,
        but in finals all is new."""
        if self.finals:
            return DeviceGone(self._gone)
        if op in ("prepare", "measure", "probe"):
            return ChildFailed(self._gone, self._gone)
        return DeviceHeld(self._gone)


def _processes(kind: ChildKind) -> BoardSession:
    """Return a session on a board of the tracker and key that the settings name."""
    settings = board_settings()
    return BoardSession(kind, BoardPool.at(settings.tvm_tracker, settings.tvm_device_key))


def _environment_by_hand(facts: Mapping[str, str]) -> Environment:
    text, address, key = (facts.get(name, "") for name in ("target", "tvm_tracker", "device_key"))
    pool, target = BoardPool.at(address, key), toolchain.parse(text) if text else None
    return environment_of(ask(pool), target, key)


def _worker_settings(asked: WorkerBoards, target: str) -> dict[str, str]:
    """Return TUNA_TVM_TRACKER and the like; what is empty is as the settings say."""
    settings = board_settings()
    tracker = asked.tracker or settings.tvm_tracker
    key = asked.device_key or settings.tvm_device_key
    target = asked.target or target or settings.tvm_target
    toolchain.tvm_version()  # refused here, for a worker that ends is started again
    BoardPool.at(tracker, key)
    if target:
        toolchain.parse(target)
    found = {"TUNA_TVM_TRACKER": tracker, "TUNA_TVM_DEVICE_KEY": key, "TUNA_TVM_TARGET": target}
    return {**found, **({"TUNA_TVM_RESET": asked.reset} if asked.reset else {})}


BOARDS = Boards("tvm", _processes, _environment_by_hand, _worker_settings)
