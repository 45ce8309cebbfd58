"""Layers of a session without a result of its own, and why: no solver takes them, or a known result
was as fast as was asked for."""

from __future__ import annotations

from dataclasses import dataclass

import sqlalchemy as sa

from tuna.db.searches import MET
from tuna.db.types import tagged
from tuna.results.core_tables import config, job, no_solver, search


@dataclass(frozen=True)
class LayerWithoutSolver:
    """A layer that jobs were asked for and that no solver of the library takes."""

    config_id: int
    layer: str  #: label of the layer
    driver: str
    kind: str
    reason: str


@dataclass(frozen=True)
class TargetMet:
    """A layer and what met its target."""

    config_key: str
    layer: str
    by: str  #: result that met the target, such as "1 ms in session 3"


def without_solver(
    connection: sa.Connection, session_id: int, tag: str | None = None
) -> list[LayerWithoutSolver]:
    """Return the layers of the session, with this tag if given, that no solver takes, in the order
    of their import."""
    row = no_solver.c
    query = (
        sa.select(row.config_id, config.c.label, config.c.driver, config.c.kind, row.reason)
        .join(config, config.c.id == row.config_id)
        .where(row.session_id == session_id, row.loaded.is_(True), tagged(config.c.id, tag))
        .order_by(row.config_id)
    )
    return [LayerWithoutSolver(*each) for each in connection.execute(query)]


def targets_met(
    connection: sa.Connection, session_id: int, tag: str | None = None
) -> tuple[TargetMet, ...]:
    """Return the layers of the session, with this tag if given, that needed no trial, in the order
    of their import."""
    found: dict[int, TargetMet] = {}
    # Of jobs by index ix_job_session_id_steps_stopped: the rows of all others are not read.
    for of in (search, job):
        query = (
            sa.select(config.c.id, config.c.key, config.c.label, sa.func.min(of.c.stopped))
            .join(config, config.c.id == of.c.config_id)
            .where(of.c.session_id == session_id, tagged(config.c.id, tag))
            .where(of.c.stopped.startswith(MET))
            .group_by(config.c.id, config.c.key, config.c.label)
        )
        for config_id, key, label, text in connection.execute(query):
            found[config_id] = TargetMet(key, label, (text or "").removeprefix(MET))
    return tuple(found[config_id] for config_id in sorted(found))
