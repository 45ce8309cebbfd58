"""The layers' best times in another session, such as the vendor's library on the same device."""

from __future__ import annotations

import sqlalchemy as sa

from tuna.db import sessions
from tuna.db.models import FindDb, Solver
from tuna.errors import BadInput
from tuna.libraries.base import Environment
from tuna.reports.report_data import Against, OtherTime


def read_against(connection: sa.Connection, session_id: int, other_id: int) -> tuple[Against, dict[int, OtherTime]]:
    """Session `other_id` and its best time of each config, by config id; raises NotFound, or BadInput if both are one."""
    if session_id == other_id:
        raise BadInput(f"Session {session_id} cannot be compared with itself.")
    own, other = sessions.get(connection, session_id), sessions.get(connection, other_id)
    query = (
        sa.select(FindDb.config_id, Solver.name, FindDb.time_ms)
        .join(Solver, Solver.id == FindDb.solver_id)
        .where(FindDb.session_id == other_id, FindDb.time_ms > 0)
        .order_by(FindDb.config_id, FindDb.time_ms, Solver.name)
    )
    best: dict[int, OtherTime] = {}
    for config_id, solver, time_ms in connection.execute(query):
        if time_ms is not None:
            best.setdefault(config_id, OtherTime(solver, time_ms))
    there = other.environment
    found = Against(other.id, there.library, there.library_version, other.reason, _differences(own.environment, there))
    return found, best


def _differences(own: Environment, other: Environment) -> tuple[str, ...]:
    """What makes the times of two environments incomparable; libraries name architectures differently, so devices decide."""
    found = []
    if own.device and other.device:
        if own.device != other.device:
            found.append(f"device: {own.device} here, {other.device} there")
    elif own.arch != other.arch:
        found.append(f"architecture: {own.arch} here, {other.arch} there")
    if own.num_cu != other.num_cu:
        found.append(f"compute units: {own.num_cu} here, {other.num_cu} there")
    here, there = (dict(environment.conditions) for environment in (own, other))
    for name in sorted(here.keys() | there.keys()):
        if here.get(name) != there.get(name):
            words = [values.get(name, "the default") for values in (here, there)]
            found.append(f"{name}: {words[0]} here, {words[1]} there")
    return tuple(found)
