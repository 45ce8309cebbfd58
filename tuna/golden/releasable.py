"""A session's results as candidates for a golden version: their provenance, or why one is not
releasable."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import sqlalchemy as sa

from tuna.db import sessions
from tuna.db.sessions import SessionInfo
from tuna.db.types import timed
from tuna.errors import BadInput
from tuna.golden.versions import NotReleasable
from tuna.results.selectable import SESSIONS, Results
from tuna.vocabulary import State

#: Fault of a result that is always left out: an older version stored times that no run can have
#: taken
IMPOSSIBLE = "impossible"
#: Predicate of the error sentence, and what to do, by fault in order of precedence
FAULTS = {
    "environment": (
        "come from an environment without library version or toolchain",
        "tune in a session whose environment is complete",
    ),
    "time": (
        "have no time, so they were not measured",
        "measure these layers: load jobs for them, then run",
    ),
    "origin": (
        "have neither a job nor a file they were imported from",
        "measure these layers in a session",
    ),
    "simulated": (
        "were timed by a stand-in, not by a device",
        "tune on a machine with the device, without TUNA_SIMULATED",
    ),
    "imported": (
        "were imported, not measured",
        "to release them nevertheless, add --allow-imported",
    ),
    "noisy": (
        "were measured on a device that was not quiet",
        "measure these layers again on a quiet machine, or add --allow-noisy to release them"
        " nevertheless",
    ),
    "job": (
        "belong to jobs that are not evaluated",
        "finish the session first: `tuna run --session-id ID`",
    ),
    "trial": (
        "come from a candidate that failed when it was last measured",
        "measure these layers again",
    ),
    "attempt": ("have no record of the attempt that measured them", "measure these layers again"),
}


@dataclass(frozen=True)
class ResultSelection:
    """A selection of a session's results."""

    session_id: int
    kind: str | None = None  #: kind of the configs that count; None: all
    allow_imported: bool = False
    allow_noisy: bool = False


def session(connection: sa.Connection, session_id: int, library: str | None = None) -> SessionInfo:
    """The session; raises NotFound, or BadInput when it does not belong to `library`."""
    found = sessions.get(connection, session_id)
    if library not in (None, found.environment.library):
        raise BadInput(
            f"Session {session_id} belongs to {found.environment.library}, not to {library}."
        )
    return found


#: Columns that tell the fault
_FAULT_BY = ("library_version", "job_state", "trial_cause", "attempt_id")


def candidates(wanted: ResultSelection) -> Results:
    """Return the session's results that are asked for."""
    mine = SESSIONS["session_id"] == wanted.session_id
    found = SESSIONS.only(mine, SESSIONS.no_baseline)
    if wanted.kind is None:
        return found
    return found.only(found["kind"] == wanted.kind, by=["kind"])


def releasable(wanted: ResultSelection) -> Results:
    """Return the candidates that have no fault."""
    return candidates(wanted).only(_fault(wanted).is_(None), by=_FAULT_BY)


def select(wanted: ResultSelection, columns: Sequence[str] = ()) -> sa.Subquery:
    """These columns of all candidates, with their key, `id` and `fault` (NULL: releasable).

    Uses find_db's unique index and, for each row, those of step_result (job, step, attempt) and
    trial.
    """
    names = dict.fromkeys(("id", "arch", "num_cu", "config_id", "solver_id", *columns))
    query = candidates(wanted).select(*names, by=_FAULT_BY)
    return query.add_columns(_fault(wanted).label("fault")).subquery("result")


def _fault(wanted: ResultSelection) -> sa.Case[Any]:
    row = SESSIONS
    known = sa.and_(row["library_version"] != "", row["toolchain"] != "")
    return sa.case(
        (sa.not_(known), "environment"),
        (sa.func.coalesce(row["time_ms"], 0.0) == 0, "time"),
        (sa.not_(timed(row["time_ms"])), IMPOSSIBLE),
        (sa.and_(row["job_id"].is_(None), sa.not_(row["imported"])), "origin"),
        (row["simulated"], "simulated"),
        (row["imported"], None if wanted.allow_imported else "imported"),
        (sa.and_(row["noisy"], sa.literal(not wanted.allow_noisy)), "noisy"),
        (row["job_state"] != State.EVALUATED.value, "job"),
        (row["trial_cause"].is_not(None), "trial"),
        (row["attempt_id"].is_(None), "attempt"),
        else_=None,
    )


def check(connection: sa.Connection, wanted: ResultSelection) -> None:
    """Raise BadInput if there are no results, NotReleasable unless all of them are releasable, or
    left out as IMPOSSIBLE."""
    found = _faults(connection, wanted)
    total = sum(count for fault, (count, _) in found.items() if fault != IMPOSSIBLE)
    of_kind = f" for {wanted.kind}" if wanted.kind else ""
    if not total:
        raise BadInput(
            f"Session {wanted.session_id} has no results{of_kind}.", hint="see: `tuna status`"
        )
    ordered = [(FAULTS[fault], *found[fault]) for fault in FAULTS if fault in found]
    if ordered:
        what = "; ".join(
            f"{count} {said} ({_name(connection, first)})" for (said, _), count, first in ordered
        )
        raise NotReleasable(
            f"Some of the {total} results of session {wanted.session_id}{of_kind} cannot become"
            f" golden: {what}.",
            hint="; ".join(todo for (_, todo), _, _ in ordered),
        )


def refused(connection: sa.Connection, wanted: ResultSelection) -> int:
    """The number of results that are not releasable."""
    faults = _faults(connection, wanted).items()
    return sum(count for fault, (count, _) in faults if fault is not None)


def impossible(connection: sa.Connection, wanted: ResultSelection) -> int:
    """Return the number of results that no version takes, for no run can have taken their time."""
    return _faults(connection, wanted).get(IMPOSSIBLE, (0, 0))[0]


def _faults(
    connection: sa.Connection, wanted: ResultSelection
) -> dict[str | None, tuple[int, int]]:
    """The number of results with each fault and the id of one; None: releasable."""
    result = select(wanted)
    query = sa.select(result.c.fault, sa.func.count(), sa.func.min(result.c.id))
    rows = connection.execute(query.group_by(result.c.fault))
    return {fault: (count, first) for fault, count, first in rows}


def _name(connection: sa.Connection, result_id: int) -> str:
    """The layer and the solver of a result, as an example for an error sentence."""
    query = SESSIONS.select("layer", "solver").where(SESSIONS["id"] == result_id)
    row = connection.execute(query).first()
    return f"such as {row.solver} for {row.layer}" if row else "it has just gone"
