"""Layers of a session that needed no trial, since a known result was as fast as was asked for."""

from __future__ import annotations

from dataclasses import dataclass

import sqlalchemy as sa

from tuna.db.models import Config, ConfigTag, Job
from tuna.db.searches import MET


@dataclass(frozen=True)
class TargetMet:
    """A layer and what met its target."""

    config_key: str
    layer: str
    by: str  #: such as "1 ms in session 3"


def targets_met(
    connection: sa.Connection, session_id: int, tag: str | None = None
) -> tuple[TargetMet, ...]:
    """Those of the session, with this tag if given, in the order of their import."""
    # Index ix_job_search: the rows of all other jobs are not read.
    query = (
        sa.select(Config.key, Config.label, sa.func.min(Job.stopped))
        .join(Config, Config.id == Job.config_id)
        .where(Job.session_id == session_id, Job.stopped.startswith(MET))
        .group_by(Config.id, Config.key, Config.label)
        .order_by(Config.id)
    )
    if tag is not None:
        query = query.where(
            Config.id.in_(sa.select(ConfigTag.config_id).where(ConfigTag.tag == tag))
        )
    return tuple(
        TargetMet(key, label, (text or "").removeprefix(MET))
        for key, label, text in connection.execute(query)
    )
