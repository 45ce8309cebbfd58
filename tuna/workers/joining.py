"""Workers that join over the network; a package brings how they do by the entry point group
`tuna.joining`."""

from __future__ import annotations

from abc import ABC, abstractmethod
from typing import ClassVar, Literal

from tuna.libraries.boards import WorkerBoards
from tuna.plugins import Plugins

Role = Literal["compile", "eval"]


class Joining(ABC):
    """One way to join."""

    #: module of a joined worker, which is run with the arguments ROLE PROCESSES
    node: ClassVar[str]

    @abstractmethod
    def create_token(
        self, role: Literal["compile", "eval", "client"], ttl_s: float, url: str | None = None
    ) -> str:
        """Make a token for a worker, or one for each role for a client; return its line.

        `url`: how workers reach what they join. Raises BadInput.
        """

    @abstractmethod
    def join(
        self,
        role: Role,
        line: str,
        processes: int = 1,
        *,
        devices: str | None = None,
        boards: WorkerBoards | None = None,
    ) -> None:
        """Become a worker that joined with the token of `line`; its settings go into this process's
        environment, for its workers.

        `processes`, `devices`, `boards`: as for `api.serve_workers`. Raises BadInput, ServiceError.
        """


_WAYS: Plugins[Joining] = Plugins(
    "tuna.joining",
    "way to join",
    Joining,  # type: ignore[type-abstract]
)


def joining() -> Joining:
    """Return the way to join that a package brings; raises LibraryMissing without one."""
    return _WAYS.only("Workers that join over the network need", "tuna-remote")
