"""TVM on a board behind TVM's RPC. This process never imports TVM: the children of
`CandidateLibrary` do.

What speaks with a board is a child that is killed when it takes too long; a chunk has one session
on one board. A candidate that crashed or hung differs from a board that vanished in that the
board's server still takes connections.
"""

from __future__ import annotations

import contextlib
import dataclasses
import os
import time
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from tuna.errors import LibraryMissing
from tuna.libraries.base import Environment, Step
from tuna.libraries.boards import Boards, WorkerBoards
from tuna.libraries.contest import Contest
from tuna.libraries.context import DeviceHandle, RunContext
from tuna.libraries.items import StepResult, WorkItem
from tuna.libraries.measurement import Call, DeviceGone, DeviceHeld
from tuna.libraries.tvm import toolchain
from tuna.libraries.tvm.library import TvmLibrary
from tuna.sandbox.processes import Child, ChildCancelled, ChildFailed, ChildFault
from tuna.settings import get_settings
from tuna.vocabulary import Resource
from tuna_remote import boards

#: Seconds to wait for a free board: when a chunk begins, and after an error.
_WAIT_S, _AGAIN_S = 20.0, 10.0
#: Seconds until the server of a board has restarted after a crash.
_BACK_S = 3.0
#: A board's server ends a session by itself this long after the last item could have ended, should
#: we not.
_MARGIN_S = 60.0


class BoardTvmLibrary(TvmLibrary):
    """TVM where TUNA_TVM_TRACKER is set: it measures on boards with TUNA_TVM_DEVICE_KEY, and
    compiles as anywhere."""

    measuring = boards.CHILD
    loader = f"{boards.CHILD}:BoardLoader"
    forkable = False

    def __init__(self) -> None:
        super().__init__()
        settings = get_settings()
        self._boards = boards.BoardPool.at(settings.tvm_tracker, settings.tvm_device_key)
        self._own: Environment | None = None  #: that of the first board
        self._board = ""  #: address of the board that has our session; empty: none is open
        self._gone = ""  #: why there is no board for the rest of the item
        self._in_finals = False  #: whether the item is one of finals
        self._session_ends = 0.0

    def environment(self) -> Environment:
        """That of a board, which is asked once; with TUNA_TVM_TARGET_ALONE that of the target,
        which the board can run."""
        own = self._of_board()
        return self.environment_of_target() or own

    def _of_board(self) -> Environment:
        if self._own is None:
            text = get_settings().tvm_target
            target = toolchain.parse(text) if text else None
            self._own = boards.environment_of(boards.ask(self._boards), target, self._boards.key)
        return self._own

    def own_device(self) -> DeviceHandle:
        """Whichever board the tracker gives this process."""
        return DeviceHandle(f"{self._boards}#{os.getpid()}")

    def probe(self, device: DeviceHandle) -> str:
        """Whether a board answers: the one of the open session, else a free one."""
        child = self._evaluator
        try:
            if self._board and child is not None and child.alive:
                child.call({"op": "ping"}, boards.HANDSHAKE_S)
            else:
                self._compare(boards.ask(self._boards))
        except (ChildFault, LibraryMissing, DeviceGone) as error:
            return boards.words(error)
        return ""

    def run(
        self, step: Step, items: Sequence[WorkItem], context: RunContext
    ) -> Iterator[StepResult]:
        """One result for each item; on boards all of them in one session."""
        if step.resource is Resource.CPU:
            yield from super().run(step, items, context)
            return
        session_s = sum(self.time_limit_s(step, item) for item in items) + _MARGIN_S
        self._session_ends = time.monotonic() + session_s
        try:
            for result in super().run(step, items, context):
                emulated = "emulator" in self._of_board().flags
                yield result.model_copy(update={"simulated": emulated})
        finally:
            self._leave()
            context.uses("")

    def close(self) -> None:
        """End the children, and with them the session."""
        self._board = ""
        super().close()

    def _loaded_and_measured(
        self, contest: Contest, paths: Mapping[int, Path], context: RunContext
    ) -> dict[str, Any]:
        self._gone, self._in_finals = "", contest.known_ms is not None
        if not self._board:
            self._open(context, _WAIT_S)
        return super()._loaded_and_measured(contest, paths, context)

    def _open(self, context: RunContext, wait_s: float) -> None:
        """Open a session within `wait_s` for a free board; raises DeviceGone, also for a board of
        another kind."""
        child, waits = self._loader_child(context), lambda: context.cancelled() or context.ending()
        try:
            if not child.alive:
                # its start, before a board waits for it
                child.call({"op": "close"}, boards.START_S, waits)
            place = self._boards.free(wait_s, waits)
            left_s = max(_MARGIN_S, self._session_ends - time.monotonic())
            facts = child.call(boards.open_request(place, left_s), boards.HANDSHAKE_S, waits)
        except ChildCancelled:
            if context.cancelled():
                raise
            raise DeviceGone("this worker is ending") from None
        except ChildFault as error:
            raise DeviceGone(boards.words(error)) from error
        self._compare(facts)
        self._board = str(facts["board"])
        context.uses(f"{self._boards.key} at {self._board}")

    def _compare(self, facts: Mapping[str, Any]) -> None:
        """Raise DeviceGone for a board that is not of this environment."""
        wanted = self._of_board()
        here = boards.environment_of(facts, toolchain.parse(wanted.target), self._boards.key)
        if here.machine_key != wanted.machine_key:
            pairs = ((name, getattr(here, name)) for name in ("device", "arch", "num_cu", "flags"))
            other = [f"{name} {own}" for name, own in pairs if own != getattr(wanted, name)]
            raise DeviceGone(
                f"the board {facts['board']} is another than the session's: {', '.join(other)}"
            )

    def _leave(self) -> None:
        """Give the board to others; the child stays."""
        child, self._board = self._evaluator, ""
        if child is not None and child.alive:
            with contextlib.suppress(ChildFault):
                child.call({"op": "close"}, boards.HANDSHAKE_S)

    def _after(self, fault: Exception, context: RunContext) -> None:
        """A new session after `fault`; raises DeviceGone unless it was what we measure that failed,
        and not the board."""
        board = self._board
        self._leave()
        if not boards.listens(board, _BACK_S):
            raise DeviceGone(f"the board {board} vanished: {boards.words(fault)}") from fault
        self._reopen(board, context)

    def _reopen(self, board: str, context: RunContext) -> None:
        """A new session after the one on `board`; if there is none, that is why candidates cannot
        be measured."""
        try:
            self._open(context, _AGAIN_S)
        except DeviceGone as gone:
            why = f"the board {board} did not come back after the candidate before"
            self._gone = f"not measured: {why}: {gone}"

    def _child(self, module: str, name: str, context: RunContext, threads: int, used: str) -> Child:
        child = super()._child(module, name, context, threads, used)
        if module == self.measuring and child.box is not None:
            child.box = dataclasses.replace(child.box, gpus=False, network=True)
        return child

    def _clean_child(self, context: RunContext) -> Child:
        """The one that has the session: no candidate runs in it."""
        return self._loader_child(context)

    def _end_tainted(self, context: RunContext) -> None:
        """No process of this machine is tainted; a session is for all items of a chunk."""

    def _fresh(self, context: RunContext) -> Call:
        """Each call in a new session, which the board serves in a new process; in the open one if a
        new one may be elsewhere."""
        call = self._caller(self._loader_child(context), context, loader=self.loader)

        def fresh(op: str, timeout_s: float, **arguments: Any) -> dict[str, Any]:
            if self._board and not context.ending() and self._boards.all_held():
                board = self._board
                self._leave()
                self._reopen(board, context)
                if (other := self._board) not in ("", board):
                    self._gone = f"not measured: {other} was given instead of the board {board}"
            return call(op, timeout_s, **arguments)

        return fresh

    def _caller(self, child: Child, context: RunContext, **common: Any) -> Call:
        plain = super()._caller(child, context, **common)
        if child is not self._evaluator:
            return plain

        def call(op: str, timeout_s: float, **arguments: Any) -> dict[str, Any]:
            if self._gone:
                raise self._without_board(op)
            try:
                return plain(op, timeout_s, **arguments)
            except ChildFault as fault:
                self._after(fault, context)
                raise

        return call

    def _without_board(self, op: str) -> Exception:
        """A candidate fails whose turn is yet to come; those that were measured stay as they are,
        but in finals all is new."""
        if self._in_finals:
            return DeviceGone(self._gone)
        if op in ("prepare", "measure", "probe"):
            return ChildFailed(self._gone, self._gone)
        return DeviceHeld(self._gone)


class TvmBoards(Boards):
    """Boards behind TVM's RPC."""

    library = "tvm"

    def measuring(self) -> BoardTvmLibrary:
        """Return TVM that measures on the boards that the settings name."""
        return BoardTvmLibrary()

    def environment_by_hand(self, facts: Mapping[str, str]) -> Environment:
        """Return the environment of a board at `tvm_tracker` with `device_key`, for its own target
        or `target`."""
        text, address, key = (
            facts.get(name, "") for name in ("target", "tvm_tracker", "device_key")
        )
        found = boards.BoardPool.at(address, key)
        target = toolchain.parse(text) if text else None
        return boards.environment_of(boards.ask(found), target, key)

    def worker_settings(self, asked: WorkerBoards, target: str) -> dict[str, str]:
        """Return TUNA_TVM_TRACKER and the like; what is empty is as the settings say."""
        settings = get_settings()
        tracker, key = (
            asked.tracker or settings.tvm_tracker,
            asked.device_key or settings.tvm_device_key,
        )
        target = asked.target or target or settings.tvm_target
        toolchain.tvm_version()  # refused here, for a worker that ends is started again
        boards.BoardPool.at(tracker, key)
        if target:
            toolchain.parse(target)
        found = {"TUNA_TVM_TRACKER": tracker, "TUNA_TVM_DEVICE_KEY": key, "TUNA_TVM_TARGET": target}
        return {**found, **({"TUNA_TVM_RESET": asked.reset} if asked.reset else {})}


BOARDS = TvmBoards()
