"""Boards that measure in the place of this machine; a package brings them by the entry point group
`tuna.boards`."""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Annotated

from pydantic import AfterValidator, Field

from tuna.common.setting_values import command
from tuna.libraries.base import Environment
from tuna.libraries.candidate_children import ChildKind
from tuna.libraries.context import DeviceHandle
from tuna.libraries.measuring_processes import MeasuringProcesses
from tuna.plugins import Plugins
from tuna.settings import SettingsSection, get_section


class BoardSettings(SettingsSection):
    """Settings of what is built for boards and measured on them."""

    cc: str = Field(
        "",
        description=(
            "compiler that links TVM's kernels for a board; default: Debian's, such as"
            " aarch64-linux-gnu-g++"
        ),
    )
    tvm_tracker: str = Field(
        "",
        description=(
            "HOST:PORT of TVM's tracker, whose boards eval workers here measure on instead of this"
            " machine"
        ),
    )
    tvm_device_key: str = Field("", description="the boards' key at that tracker")
    tvm_target: str = Field(
        "",
        description=(
            "the target that the boards' kernels are compiled for; default: the boards' own"
        ),
    )
    tvm_target_alone: bool = Field(
        False,
        description=(
            "measure for sessions that TUNA_TVM_TARGET alone describes, whichever device this is,"
            " so that devices of one target are alike; `tuna rpc-client` sets it"
        ),
    )
    tvm_reset: Annotated[str, AfterValidator(command)] = Field(
        "",
        description=(
            "command line that may bring a lost board back, run while a worker waits for it"
        ),
    )


def board_settings() -> BoardSettings:
    """Return the settings of this process; raises BadInput with the name of an invalid one."""
    return get_section(BoardSettings)


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


@dataclass(frozen=True)
class Boards:
    """One kind of boards."""

    library: str  #: name of the library that measures on them
    #: function that returns the processes of the library on the boards that the settings name;
    #: given the kind of its processes on this machine
    processes: Callable[[ChildKind], BoardProcesses]
    #: function that returns the environment of a board at `tvm_tracker` with `device_key`, for its
    #: own target or `target`; raises BadInput, LibraryMissing
    environment_by_hand: Callable[[Mapping[str, str]], Environment]
    #: function that returns the settings of a worker that measures on boards, for its session's
    #: target where there is one; raises BadInput, LibraryMissing
    worker_settings: Callable[[WorkerBoards, str], dict[str, str]]


_KINDS: Plugins[Boards] = Plugins("tuna.boards", "kind of boards", Boards)


def installed_boards() -> Boards:
    """Return the boards that a package brings; raises LibraryMissing without one."""
    return _KINDS.only("Measuring on boards needs", "tuna-remote")
