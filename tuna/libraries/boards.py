"""Boards that measure in the place of this machine; a package brings them by the entry point group
`tuna.boards`."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Mapping
from dataclasses import dataclass
from typing import ClassVar

from tuna.errors import LibraryMissing
from tuna.libraries.base import Environment
from tuna.libraries.candidate_children import ChildKind
from tuna.libraries.context import DeviceHandle
from tuna.libraries.measuring_processes import MeasuringProcesses
from tuna.plugins import Plugins


@dataclass(frozen=True)
class WorkerBoards:
    """The boards that an eval worker measures on; what is empty is as the settings say."""

    tracker: str = ""  #: address of the tracker, HOST:PORT; empty: none
    device_key: str = ""
    target: str = ""
    reset: str = ""  #: command line that may bring a lost board back


class BoardProcesses(MeasuringProcesses):
    """Processes that measure on boards."""

    @abstractmethod
    def environment(self) -> Environment:
        """Return that of a board, which is asked once; raises LibraryMissing."""

    @abstractmethod
    def own_device(self) -> DeviceHandle:
        """Return the handle of whichever board this process gets."""


class Boards(ABC):
    """One kind of boards."""

    library: ClassVar[str]  #: name of the library that measures on them

    @abstractmethod
    def processes(self, kind: ChildKind) -> BoardProcesses:
        """Return the processes of the library on the boards that the settings name; `kind`: of its
        processes on this machine."""

    @abstractmethod
    def environment_by_hand(self, facts: Mapping[str, str]) -> Environment:
        """Return the environment of a board at `tvm_tracker` with `device_key`, for its own target
        or `target`; raises BadInput, LibraryMissing."""

    @abstractmethod
    def worker_settings(self, asked: WorkerBoards, target: str) -> dict[str, str]:
        """Return the settings of a worker that measures on boards, for its session's `target` where
        there is one; raises BadInput, LibraryMissing."""


_KINDS: Plugins[Boards] = Plugins(
    "tuna.boards",
    "kind of boards",
    Boards,  # type: ignore[type-abstract]
)


def installed_boards() -> Boards:
    """Return the boards that a package brings; raises LibraryMissing without one."""
    for found in _KINDS.all().values():
        return found
    raise LibraryMissing(
        "Measuring on boards needs the package tuna-remote.", hint="pip install tuna-remote"
    )
