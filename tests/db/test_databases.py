"""The databases that tests start from are what a migration makes."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import sqlalchemy as sa
from builders import DatabaseBuilder
from databases import MariadbDatabase, SqliteTemplate

from tuna.db import database
from tuna.db.engine import make_engine, writing


def _content(engine: sa.Engine) -> dict[str, Any]:
    """The rows of each table but for what is drawn at random, and the number of the first
    session."""
    tables = sa.MetaData()
    tables.reflect(engine)
    drawn = ("namespace", "secret", "gateway_secret")
    with engine.connect() as connection:
        found: dict[str, Any] = {
            name: connection.execute(
                sa.select(*(column for column in table.c if column.name not in drawn))
            ).all()
            for name, table in tables.tables.items()
        }
    with writing(engine) as connection:
        found["first session"] = DatabaseBuilder(connection).session()
    return found


def _identity(engine: sa.Engine) -> tuple[str, str]:
    with engine.connect() as connection:
        namespace, secret = connection.execute(
            sa.text("SELECT namespace, secret FROM installation")
        ).one()
    return namespace, secret


def test_what_a_test_left_open_in_mariadb_stops_nobody(mariadb_url: str) -> None:
    database = MariadbDatabase(mariadb_url)
    engine = make_engine(database.renew())
    with engine.connect() as connection:
        DatabaseBuilder(connection).session()
        make_engine(database.renew()).dispose()
        connection.invalidate()
    assert _content(engine)["session"] == []
    engine.dispose()
    database.drop()


def test_a_copy_of_the_sqlite_file_is_as_a_migrated_one(
    sqlite_template: SqliteTemplate, tmp_path: Path
) -> None:
    migrated = make_engine(f"sqlite:///{tmp_path}/migrated.sqlite")
    database.upgrade(migrated)
    copies = [sqlite_template.engine(tmp_path / f"{number}.sqlite") for number in range(2)]
    assert len({_identity(engine) for engine in (migrated, *copies)}) == 3
    expected = _content(migrated)
    for copy in copies:
        assert _content(copy) == expected
    for engine in (migrated, *copies):
        engine.dispose()
