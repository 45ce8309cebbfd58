"""Sessions: create, prepare, watch, report."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from datetime import datetime
from pathlib import Path
from typing import TYPE_CHECKING

from tuna.errors import BadInput

if TYPE_CHECKING:
    from tuna.db.overview import Overview
    from tuna.db.solvers import Applicability, StoredSolver
    from tuna.libraries.base import Environment
    from tuna.libraries.conditions import Condition
    from tuna.reports.comparison import Comparison
    from tuna.reports.report_data import ReportFigures
    from tuna.reports.status import Outlook, Watcher


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
) -> StartedSession:
    """The session for (environment, reason), created if there is none.

    The environment is this machine's, or the one of `facts` (`arch`, `num_cu`, `rocm_v`, `miopen_v`
    for MIOpen), where the library allows that. `conditions` say how results are measured; raises
    BadInput for one that the library does not offer.
    """
    from tuna.db import sessions
    from tuna.db.database import open_database
    from tuna.db.engine import writing

    environment = session_environment(library, facts, conditions)
    with writing(open_database()) as connection:
        session_id, new = sessions.create(connection, environment, reason)
    return StartedSession(session_id, reason, environment, new)


def session_environment(
    library: str,
    facts: Mapping[str, str] | None = None,
    conditions: Mapping[str, str] | None = None,
) -> Environment:
    """The environment that `init_session` with these arguments is in; raises what it raises.
    Nothing is stored."""
    from tuna import logs
    from tuna.libraries.conditions import chosen
    from tuna.libraries.registry import get_library
    from tuna.settings import get_settings

    logs.configure(get_settings().log_level, get_settings().log_format)  # a target may be a warning
    found = get_library(library)
    kept = chosen(found.conditions, conditions or {}, library)
    here = found.environment_by_hand(facts) if facts else found.environment()
    return replace(here, conditions=kept)


def set_priority(session_id: int, priority: int) -> None:
    """Set the priority of a session, 0 to 9: the highest is served first. Raises NotFound,
    BadInput."""
    from tuna.db import sessions
    from tuna.db.database import open_database
    from tuna.db.engine import writing

    with writing(open_database()) as connection:
        sessions.set_priority(connection, session_id, priority)


def set_deadline(session_id: int, deadline: datetime | None) -> None:
    """Say when a session should have ended, for the policy `deadline`; None: no deadline. Raises
    NotFound."""
    from tuna.db import sessions
    from tuna.db.database import open_database
    from tuna.db.engine import writing

    with writing(open_database()) as connection:
        sessions.set_deadline(connection, session_id, deadline)


def outlook(session_id: int) -> Outlook | None:
    """What is left of a session, whether that can keep its deadline, and the error of the
    prediction.

    None if its library is not installed here. Raises NotFound.
    """
    from tuna.db.database import open_database
    from tuna.reports.status import read_outlook
    from tuna.settings import get_settings

    return read_outlook(open_database(), get_settings(), session_id)


def update_solvers(library: str) -> int:
    """Store the solvers that the library has now; returns how many."""
    from tuna.db import solvers
    from tuna.db.database import open_database
    from tuna.db.engine import writing
    from tuna.libraries.registry import get_library

    with writing(open_database()) as connection:
        return solvers.update_solvers(connection, get_library(library))


def list_job_options(library: str) -> list[tuple[str, str, str, str]]:
    """(name, type, default, meaning) of each job option of the library."""
    from tuna.libraries.options import describe
    from tuna.libraries.registry import get_library

    return describe(get_library(library).options)


def list_conditions(library: str) -> list[Condition]:
    """What sessions of the library may choose of how their results are measured."""
    from tuna.libraries.registry import get_library

    return list(get_library(library).conditions)


def list_solvers(library: str) -> list[StoredSolver]:
    """The stored solvers of the library; raises BadInput before `update_solvers`."""
    from tuna.db import solvers
    from tuna.db.database import open_database
    from tuna.db.engine import reading
    from tuna.libraries.registry import get_library

    with reading(open_database()) as connection:
        return solvers.list_solvers(connection, get_library(library).name)


def update_applicability(
    session_id: int, tag: str | None = None, *, library: str | None = None
) -> Applicability:
    """Determine which solvers can run which layers (those with `tag`, or all) in the session.

    Raises BadInput if the session is not of `library`, should one be named.
    """
    from tuna.db import solvers
    from tuna.db.database import open_database
    from tuna.libraries.registry import get_library

    tuned = get_library(session_library(session_id, library))
    return solvers.update_applicability(open_database(), tuned, session_id, tag)


def session_library(session_id: int, expected: str | None = None) -> str:
    """The library of the session; raises NotFound, or BadInput when another one was expected."""
    from tuna.db import sessions
    from tuna.db.database import open_database
    from tuna.db.engine import reading

    with reading(open_database()) as connection:
        name = sessions.get(connection, session_id).environment.library
    if expected is not None and name != expected:
        raise BadInput(f"Session {session_id} belongs to {name}, not to {expected}.")
    return name


def check_device(session_id: int, arch: str | None, num_cu: int | None) -> None:
    """Raise BadInput for a device that is not the session's, should one be named."""
    from tuna.db import sessions
    from tuna.db.database import open_database
    from tuna.db.engine import reading

    with reading(open_database()) as connection:
        there = sessions.get(connection, session_id).environment
    if arch not in (None, there.arch) or num_cu not in (None, there.num_cu):
        raise BadInput(
            f"Session {session_id} is for {there.arch} with {there.num_cu} compute units."
        )


def status(session_id: int | None = None, *, commands: bool = True) -> list[Overview]:
    """All sessions, or one: jobs by state, failures by cause, with the commands that repeat them
    unless `commands` is false.

    Raises NotFound for an unknown session.
    """
    from tuna.db import overview
    from tuna.db.database import open_database

    engine = open_database()
    found = overview.read(engine, session_id)
    if session_id is not None and not found:
        from tuna.db import sessions
        from tuna.db.engine import reading

        with reading(engine) as connection:
            sessions.get(connection, session_id)  # raises NotFound with the list of sessions
    if not commands or not any(session.failures for session in found):
        return found
    from tuna.queue.reproduction import with_commands  # loads the libraries

    return with_commands(engine, found)


def undrained_reports() -> int:
    """The number of reports of workers that are malformed or that the database refused; they are in
    `dead_letter`."""
    from tuna.db import overview
    from tuna.db.database import open_database

    return overview.undrained(open_database())


def workers_aside() -> dict[str, str]:
    """Return why workers take nothing for the moment, by name; none if Redis does not answer."""
    from tuna.db import sessions as table
    from tuna.db.database import open_database
    from tuna.db.engine import reading
    from tuna.reports.status import live_workers
    from tuna.settings import get_settings

    with reading(open_database()) as connection:
        namespace = table.namespace(connection)
    return {
        one.name: one.aside for one in live_workers(get_settings(), namespace) or () if one.aside
    }


def watcher(session_id: int | None = None) -> Watcher:
    """Watcher of all sessions or one, to be polled with `look()`: rates, ETA, efficiency,
    workers."""
    from tuna.db.database import open_database
    from tuna.reports.status import Watcher
    from tuna.settings import get_settings

    return Watcher(open_database(), get_settings(), session_id)


def report(session_id: int, against: int | None = None) -> ReportFigures:
    """All figures of a session's report, beside the times of session `against`; raises NotFound,
    BadInput."""
    from tuna.db.database import open_database
    from tuna.db.engine import reading
    from tuna.reports.queries import read_figures

    with reading(open_database()) as connection:
        return read_figures(connection, session_id, against)


def compare_sessions(session_ids: Sequence[int], tag: str | None = None) -> Comparison:
    """Layer by layer the results of two sessions or more, each against the first; with `tag` only
    its layers.

    Raises BadInput for fewer than two sessions, NotFound for an unknown one, or where they have no
    layer in common.
    """
    from tuna.db.database import open_database
    from tuna.db.engine import reading
    from tuna.reports.comparison import compare

    with reading(open_database()) as connection:
        return compare(connection, session_ids, tag)


def write_report(figures: ReportFigures | int, path: Path, against: int | None = None) -> Path:
    """Write figures, or those of a session (beside the times of session `against`), as one HTML
    file; returns its path.

    Raises NotFound, BadInput, StorageFull.
    """
    from tuna.reports.html import write

    return write(report(figures, against) if isinstance(figures, int) else figures, path)
