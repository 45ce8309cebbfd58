"""Sessions before they run: environment, solvers, applicability, options."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace

from tuna import logs
from tuna.api.sessions import session_library
from tuna.db import sessions, solvers
from tuna.db.database import open_database
from tuna.db.engine import reading, writing
from tuna.db.solvers import Applicability, StoredSolver
from tuna.libraries.base import Environment
from tuna.libraries.options import Condition, chosen, describe
from tuna.libraries.registry import get_library
from tuna.settings import get_settings


@dataclass(frozen=True)
class StartedSession:
    """The requested session; `new` unless it existed already."""

    id: int
    reason: str
    environment: Environment
    new: bool


def init_session(
    library: str,
    reason: str,
    facts: Mapping[str, str] | None = None,
    conditions: Mapping[str, str] | None = None,
    options: Mapping[str, object] | None = None,
) -> StartedSession:
    """The session for (environment, reason), created if there is none.

    The environment is this machine's, or the one of `facts` (`arch`, `num_cu`, `rocm_v`, `miopen_v`
    for MIOpen), where the library allows that. `conditions` say how results are measured; raises
    BadInput for one that the library does not offer. `options`: those of the session
    (`SessionOptions`), also for one that is there.
    """
    environment = session_environment(library, facts, conditions)
    with writing(open_database()) as connection:
        session_id, new = sessions.create(connection, environment, reason)
        if options:
            sessions.set_options(connection, session_id, options)
    return StartedSession(session_id, reason, environment, new)


def session_environment(
    library: str,
    facts: Mapping[str, str] | None = None,
    conditions: Mapping[str, str] | None = None,
) -> Environment:
    """The environment that `init_session` with these arguments is in; raises what it raises.
    Nothing is stored."""
    logs.configure(get_settings().log_level, get_settings().log_format)  # a target may be a warning
    found = get_library(library)
    kept = chosen(found.conditions, conditions or {}, library)
    here = found.environment_by_hand(facts) if facts else found.environment()
    return replace(here, conditions=kept)


def update_solvers(library: str) -> int:
    """Store the solvers that the library has now; returns how many."""
    with writing(open_database()) as connection:
        return solvers.update_solvers(connection, get_library(library))


def list_job_options(library: str) -> list[tuple[str, str, str, str]]:
    """(name, type, default, meaning) of each job option of the library."""
    return describe(get_library(library).options)


def list_conditions(library: str) -> list[Condition]:
    """Return the conditions of measurement that sessions of the library may choose."""
    return list(get_library(library).conditions)


def list_solvers(library: str) -> list[StoredSolver]:
    """The stored solvers of the library; raises BadInput before `update_solvers`."""
    with reading(open_database()) as connection:
        return solvers.list_solvers(connection, get_library(library).name)


def update_applicability(
    session_id: int, tag: str | None = None, *, library: str | None = None
) -> Applicability:
    """Determine which solvers can run which layers (those with `tag`, or all) in the session.

    Raises BadInput if the session is not of `library`, should one be named.
    """
    tuned = get_library(session_library(session_id, library))
    return solvers.update_applicability(open_database(), tuned, session_id, tag)
