"""Names that a user may want to type: of sessions, tags, libraries and solvers. Nothing is made or
started for them."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import sqlalchemy as sa
from sqlalchemy.exc import DBAPIError

from tuna.db.database import connect_database
from tuna.db.engine import reading
from tuna.db.models import ConfigTag, EnvironmentRow, Session, SolverRow
from tuna.errors import TunaError
from tuna.libraries import registry
from tuna.settings import get_settings

_MOST = 200


def known_sessions() -> list[tuple[str, str]]:
    """The latest sessions, each with its library and reason."""
    query = (
        sa.select(Session.id, EnvironmentRow.library, Session.reason)
        .join(EnvironmentRow, EnvironmentRow.id == Session.environment_id)
        .order_by(Session.id.desc())
        .limit(_MOST)
    )
    return [(str(row.id), f"{row.library}: {row.reason}") for row in _rows(query)]


def known_tags() -> list[str]:
    """The tags of layers."""
    return [
        row.tag
        for row in _rows(sa.select(ConfigTag.tag).distinct().order_by(ConfigTag.tag).limit(_MOST))
    ]


def known_solvers(library: str | None = None) -> list[str]:
    """The stored solvers, of one library or of all."""
    query = sa.select(SolverRow.name).distinct().order_by(SolverRow.name).limit(_MOST)
    return [
        row.name
        for row in _rows(query if library is None else query.where(SolverRow.library == library))
    ]


def known_libraries() -> list[str]:
    """The libraries that are installed here."""
    return registry.names()


def _rows(query: sa.Executable) -> Sequence[Any]:
    """Nothing where there is no database, or none that can be read."""
    settings = get_settings()
    if settings.embedded_db and not (settings.home / "tuna.sqlite").exists():
        return []
    try:
        with reading(connect_database()) as connection:
            return connection.execute(query).all()
    except (TunaError, DBAPIError):
        return []
