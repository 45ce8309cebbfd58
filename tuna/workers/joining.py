"""Workers that join over the network; a package brings how they do by the entry point group
`tuna.joining`."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Literal

from tuna.plugins import Plugins

Role = Literal["compile", "eval"]


@dataclass(frozen=True)
class Joining:
    """One way to join."""

    node: str  #: module of a joined worker, which is run with the arguments ROLE PROCESSES
    #: `create_token(role, ttl_s, url)`: make a token for a worker, or one for each role for a
    #: client, and return its line. `url`: how workers reach what they join. Raises BadInput.
    create_token: Callable[[Literal["compile", "eval", "client"], float, str | None], str]
    #: `join(role, line, processes, devices=, boards=)`: become a worker that joined with the token
    #: of `line`; its settings go into this process's environment, for its workers. The others are
    #: as for `api.serve_workers`. Raises BadInput, ServiceError.
    join: Callable[..., None]


_WAYS: Plugins[Joining] = Plugins("tuna.joining", "way to join", Joining)


def joining() -> Joining:
    """Return the way to join that a package brings; raises LibraryMissing without one."""
    return _WAYS.only("Workers that join over the network need", "tuna-remote")
