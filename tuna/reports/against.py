"""The layers' best times in another session, such as the vendor's library on the same device."""

from __future__ import annotations

import sqlalchemy as sa

from tuna.db import sessions
from tuna.db.baselines import is_no_baseline
from tuna.db.models import FindDb, Solver
from tuna.errors import BadInput
from tuna.reports.comparison import differences
from tuna.reports.report_data import Against, OtherTime


def read_against(connection: sa.Connection, session_id: int, other_id: int) -> tuple[Against, dict[int, OtherTime]]:
    """Session `other_id` and its best time of each config, by config id; raises NotFound, or BadInput if both are one."""
    if session_id == other_id:
        raise BadInput(f"Session {session_id} cannot be compared with itself.")
    own, other = sessions.get(connection, session_id), sessions.get(connection, other_id)
    query = (
        sa.select(FindDb.config_id, Solver.name, FindDb.time_ms)
        .join(Solver, Solver.id == FindDb.solver_id)
        .where(FindDb.session_id == other_id, FindDb.time_ms > 0, is_no_baseline())
        .order_by(FindDb.config_id, FindDb.time_ms, Solver.name)
    )
    best: dict[int, OtherTime] = {}
    for config_id, solver, time_ms in connection.execute(query):
        if time_ms is not None:
            best.setdefault(config_id, OtherTime(solver, time_ms))
    there = other.environment
    found = Against(
        other.id,
        there.library,
        there.library_version,
        other.reason,
        differences([own.id, other.id], [own.environment, there]),
    )
    return found, best
