"""The database and the services: schema, checks, metrics."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import sqlalchemy as sa

from tuna.artifacts.store import Artifacts
from tuna.db import database, sessions
from tuna.db.database import connect_database
from tuna.db.engine import reading
from tuna.db.models import Base
from tuna.reports.prometheus import serve
from tuna.settings import get_settings


@dataclass(frozen=True)
class Upgrade:
    """A change of the schema: revisions before (None: the database was empty) and after."""

    url: str  #: without its password
    before: str | None
    after: str


def artifact_store(engine: sa.Engine) -> Artifacts:
    """The artifact store, with the keys that sign and verify."""
    settings = get_settings()
    with reading(engine) as connection:
        keys = sessions.artifact_keys(connection, settings)
        return Artifacts.from_settings(settings, sessions.namespace(connection), keys)


def upgrade_database() -> Upgrade:
    """Bring the schema of the database to the one that this version needs."""
    engine = connect_database()
    before = database.revision(engine)
    database.upgrade(engine)
    return Upgrade(engine.url.render_as_string(hide_password=True), before, database.HEAD)


def list_tables() -> list[str]:
    """The names of all tables that a database with the current schema has."""
    return sorted(Base.metadata.tables)


def serve_metrics(listen: str, started: Callable[[str], None]) -> None:
    """Answer Prometheus at `listen` (HOST:PORT) until Ctrl-C; `started` gets the URL."""
    serve(connect_database(), get_settings(), listen, started)
