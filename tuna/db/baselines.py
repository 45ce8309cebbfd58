"""Results of baselines, solvers that only show what tuning gains: no part of what is exported or
released."""

from __future__ import annotations

import sqlalchemy as sa
from sqlalchemy.orm import aliased

from tuna.db.models import FindDb, Solver
from tuna.db.types import timed
from tuna.vocabulary import BASELINE


def is_no_baseline() -> sa.ColumnElement[bool]:
    """True for a row of find_db, unless it is a baseline's and the session has another timed result
    for the config.

    The second half is evaluated for baselines only; find_db's unique index (session, config,
    solver) serves it.
    """
    baselines = sa.select(Solver.id).where(Solver.algorithm == BASELINE)
    other = aliased(FindDb)
    same = (other.session_id == FindDb.session_id, other.config_id == FindDb.config_id)
    tuned = sa.exists().where(*same, other.time_ms.is_not(None), other.solver_id.not_in(baselines))
    return sa.or_(FindDb.solver_id.not_in(baselines), sa.not_(tuned.correlate(FindDb)))


def is_measured() -> tuple[sa.ColumnElement[bool], ...]:
    """Conditions on find_db that leave results which a device gave: timed, not simulated, and no
    baseline's as above."""
    return timed(FindDb.time_ms), FindDb.simulated.is_(False), is_no_baseline()
