"""Databases with the current schema, migrated once: a SQLite file is then copied, a MariaDB
database emptied.

A migration takes 0.1 s on SQLite and more than a second on MariaDB, and hundreds of tests want its
outcome. Likewise a statement is compiled once in a process and not once for the engine of each
test.
"""

from __future__ import annotations

import contextlib
import secrets
import shutil
import sqlite3
import uuid
from pathlib import Path
from typing import Any

import sqlalchemy as sa
from alembic.autogenerate import compare_metadata
from alembic.migration import MigrationContext
from sqlalchemy.engine.default import DefaultDialect
from sqlalchemy.exc import DBAPIError
from sqlalchemy.util import LRUCache

from tuna.db import database
from tuna.db.engine import make_engine
from tuna.db.models import Base

#: A table with more rows is truncated, which takes as long whatever it holds; one with fewer is
#: emptied faster by DELETE.
_MANY_ROWS = 1000


def share_compiled_statements() -> None:
    """Give all engines of this process one cache of compiled statements; SQLAlchemy has one for
    each, with its dialect as key."""
    shared: LRUCache[Any, Any] = LRUCache(4000)
    initialize = sa.Engine.__init__

    def with_shared_cache(self: sa.Engine, *args: Any, **options: Any) -> None:
        initialize(self, *args, **options)
        self._compiled_cache = shared

    def facts(dialect: DefaultDialect) -> tuple[Any, ...]:
        return type(dialect), dialect.paramstyle, dialect.server_version_info

    sa.Engine.__init__ = with_shared_cache
    DefaultDialect.__eq__ = lambda one, other: facts(one) == facts(other)
    DefaultDialect.__hash__ = lambda dialect: hash(type(dialect))


def differences(engine: sa.Engine) -> list[Any]:
    """What of a database's schema is not as the models say."""
    with engine.connect() as connection:
        options = {
            "compare_type": connection.dialect.name == "sqlite",
            "compare_server_default": lambda *facts: _plain(facts[3]) != _plain(facts[5]),
        }
        found: list[Any] = compare_metadata(
            MigrationContext.configure(connection, opts=options), Base.metadata
        )
        return found


def _plain(default: str | None) -> str | None:
    """The default of a column without its quotes, as SQL or as a database shows it."""
    shown = None if default is None else default.strip("()").strip("'")
    return {"false": "0", "NULL": None}.get(str(shown), shown)


class SqliteTemplate:
    """A migrated SQLite file and its copies."""

    def __init__(self, path: Path) -> None:
        self._path = path
        engine = make_engine(f"sqlite:///{path}")
        database.upgrade(engine)
        engine.dispose()  # the last connection moves the write-ahead log into the file

    def copy_to(self, path: Path) -> None:
        """What a migration of the new file `path` leaves, with a namespace and secrets of its
        own."""
        shutil.copyfile(self._path, path)
        path.chmod(0o600)
        connection = sqlite3.connect(path)
        with connection:
            connection.execute(
                "UPDATE installation SET namespace = ?, secret = ?, gateway_secret = ?", _identity()
            )
        connection.close()

    def engine(self, path: Path) -> sa.Engine:
        """An engine on a copy at `path`."""
        self.copy_to(path)
        return make_engine(f"sqlite:///{path}")


class MariadbDatabase:
    """A database of a MariaDB server that is migrated once; `renew` gives it back as the migration
    left it."""

    def __init__(self, server_url: str) -> None:
        self._base = sa.make_url(server_url)
        self._server = make_engine(server_url)
        self._name = f"tuna_{uuid.uuid4().hex[:12]}"
        self._schema: list[tuple[Any, ...]] = []  # what the migration made
        self._tables: list[str] = []

    def renew(self) -> str:
        """The URL of the database, with the current schema and no rows but the migrations'."""
        with self._server.connect().execution_options(isolation_level="AUTOCOMMIT") as connection:
            if not self._schema or not self._wiped(connection):
                connection.exec_driver_sql(f"CREATE OR REPLACE DATABASE {self._name}")
                engine = make_engine(self._url())
                database.upgrade(engine)
                engine.dispose()
                connection.exec_driver_sql(f"USE {self._name}")
                self._schema = columns_and_keys(connection)
                self._tables = list(_next_numbers(connection))
        return self._url()

    def drop(self) -> None:
        """Remove it from the server."""
        with self._server.connect() as connection:
            connection.exec_driver_sql(f"DROP DATABASE IF EXISTS {self._name}")
        self._server.dispose()

    def _url(self) -> str:
        return self._base.set(database=self._name).render_as_string(hide_password=False)

    def _wiped(self, connection: sa.Connection) -> bool:
        """Empty all tables; False when the test left another schema, so that the database has to be
        made again."""
        others = connection.exec_driver_sql(
            "SELECT id FROM information_schema.processlist WHERE db = %s AND id != connection_id()",
            (self._name,),
        )
        for number in others.scalars().all():  # what a test left open could hold locks
            with contextlib.suppress(DBAPIError):  # gone by itself
                connection.exec_driver_sql(f"KILL {number}")
        connection.exec_driver_sql(f"USE {self._name}")
        connection.exec_driver_sql("SET foreign_key_checks = 0")
        if columns_and_keys(connection) != self._schema:
            return False
        for table, rows in self._rows(connection).items():
            if table == "alembic_version":
                continue
            if rows > _MANY_ROWS:
                connection.exec_driver_sql(f"TRUNCATE TABLE `{table}`")
            elif rows:
                connection.exec_driver_sql(f"DELETE FROM `{table}`")
        connection.exec_driver_sql(
            "INSERT INTO installation (id, namespace, secret, gateway_secret)"
            " VALUES (1, %s, %s, %s)",
            _identity(),
        )
        connection.exec_driver_sql("UPDATE alembic_version SET version_num = %s", (database.HEAD,))
        for table, number in _next_numbers(connection).items():
            if number not in (None, 1):
                connection.exec_driver_sql(f"ALTER TABLE `{table}` AUTO_INCREMENT = 1")
        return True

    def _rows(self, connection: sa.Connection) -> dict[str, int]:
        """How many rows each table has, counted to a little beyond _MANY_ROWS."""
        counts = (
            f"SELECT '{table}', count(*) FROM (SELECT 1 FROM `{table}` LIMIT {_MANY_ROWS + 1}) some"
            for table in self._tables
        )
        return dict(connection.exec_driver_sql(" UNION ALL ".join(counts)).all())


class Cut(Exception):
    """An upgrade ended here, as a killed one would."""


#: On SQLite a cut rolls its revision back, whichever statement it is after.
_CUT_EACH = 8


def upgrade_in_pieces(engine: sa.Engine, most: int = 1000) -> int:
    """Upgrade, cut off after each of the first `most` statements that change something, on SQLite
    after some of them; returns how often it was cut off."""
    done: set[tuple[str, str]] = set()
    cuts = 0
    each = _CUT_EACH if engine.dialect.name == "sqlite" else 1

    def cut(_connection: Any, _cursor: Any, statement: str, given: Any, *_: Any) -> None:
        nonlocal cuts
        words = statement.split(maxsplit=1)
        if words[0] in ("CREATE", "ALTER", "DROP", "INSERT", "UPDATE", "DELETE"):
            # What the cut rolls back is done again, and then not cut off; random values and times
            # differ.
            key = (statement, repr(given) if "alembic_version" in statement else "")
            if key not in done and len(done) < most:
                done.add(key)
                if len(done) % each == 0:
                    cuts += 1
                    raise Cut(statement)

    sa.event.listen(engine, "after_cursor_execute", cut)
    try:
        while True:
            with contextlib.suppress(Cut):
                database.upgrade(engine)
                return cuts
    finally:
        sa.event.remove(engine, "after_cursor_execute", cut)


def columns_and_keys(connection: sa.Connection) -> list[tuple[Any, ...]]:
    """All columns, and all indexes and keys with theirs."""
    found: list[tuple[Any, ...]] = []
    for query in (
        (
            "SELECT table_name, column_name, column_type, is_nullable, column_default, extra "
            "FROM information_schema.columns WHERE table_schema = database()"
        ),
        (
            "SELECT table_name, index_name, non_unique, seq_in_index, column_name "
            "FROM information_schema.statistics WHERE table_schema = database()"
        ),
        (
            "SELECT table_name, constraint_name, constraint_type, NULL "
            "FROM information_schema.table_constraints WHERE table_schema = database()"
        ),
    ):
        found += sorted(map(tuple, connection.exec_driver_sql(query).all()), key=repr)
    return found


def _next_numbers(connection: sa.Connection) -> dict[str, int | None]:
    """The number that each table gives next; None if it gives none."""
    query = (
        "SELECT table_name, auto_increment FROM information_schema.tables WHERE table_schema ="
        " database()"
    )
    return dict(connection.exec_driver_sql(query).all())


def _identity() -> tuple[str, str, str]:
    """A namespace and two secrets."""
    return uuid.uuid4().hex[:12], secrets.token_hex(32), secrets.token_hex(32)
