"""The database that the settings name: connected to, and made and upgraded where it is the embedded
one; the versions of its schema."""

from __future__ import annotations

import contextlib
import fcntl
import os
import secrets
import uuid
from collections.abc import Iterator
from contextvars import ContextVar
from pathlib import Path
from typing import TYPE_CHECKING

import sqlalchemy as sa
from sqlalchemy.exc import DBAPIError

from tuna.common import logs
from tuna.common.files import make_home
from tuna.db.engine import make_engine, reading
from tuna.errors import BadInput, DatabaseError, SchemaError
from tuna.settings import get_settings

if TYPE_CHECKING:
    from alembic.script import ScriptDirectory


def open_database() -> sa.Engine:
    """The database of the settings with a current schema: an embedded one is made and upgraded by
    itself.

    From then on logs go to stderr, from `TUNA_LOG_LEVEL` on. Raises BadInput, or DatabaseError with
    what to run.
    """
    opened = _OPENED.get()
    if opened is not None:
        return opened
    logs.configure(get_settings().log_level, get_settings().log_format)
    engine = connect_database()
    require(engine, embedded=get_settings().embedded_db)
    return engine


_OPENED: ContextVar[sa.Engine | None] = ContextVar("opened", default=None)


@contextlib.contextmanager
def keeping_open(engine: sa.Engine) -> Iterator[None]:
    """Let `open_database` return this engine while the block runs, in it and in its threads: who
    answers many requests does not connect for each."""
    token = _OPENED.set(engine)
    try:
        yield
    finally:
        _OPENED.reset(token)


def connect_database() -> sa.Engine:
    """The database of the settings, whatever its schema."""
    settings = get_settings()
    make_home(settings.home)
    try:
        if settings.embedded_db:
            _make_private(settings.home / "tuna.sqlite")
    except OSError as error:
        raise BadInput(
            f"The folder {settings.home} cannot be used: {error.strerror}.", hint="set TUNA_HOME"
        ) from None
    return make_engine(settings.sql_url)


def _make_private(path: Path) -> None:
    """Make the file before SQLite does, which gives the files beside it the same permissions.

    A file that is there is not touched: closing it would drop every lock that this process has on
    it (POSIX), and then the next process to leave takes the write-ahead log for its own and deletes
    it.
    """
    with contextlib.suppress(FileExistsError):
        if not path.exists():
            os.close(os.open(path, os.O_RDONLY | os.O_CREAT | os.O_EXCL, 0o600))


#: The newest revision in tuna/db/migrations/versions. Repeated here because importing alembic takes
#: 0.2 s; a test compares.
HEAD = "0044"
#: Revisions that `upgrade` can start from, oldest first: the oldest is the baseline.
KNOWN = ("0043", "0044")


def migrations_dir() -> Path:
    """Directory of the Alembic scripts."""
    return Path(__file__).parent / "migrations"


def revision(engine: sa.Engine) -> str | None:
    """Return the schema revision of the database; None if it is empty, or its first upgrade was cut
    off.

    Raises SchemaError for tables that are not Tuna's.
    """
    with reading(engine) as connection:
        tables = set(sa.inspect(connection).get_table_names())
        if "alembic_version" in tables:
            number: str | None = connection.execute(
                sa.text("SELECT version_num FROM alembic_version")
            ).scalar()
            return number
    if tables:
        where = engine.url.render_as_string(hide_password=True)
        raise SchemaError(
            f"The database {where} holds tables that are not Tuna's (such as {sorted(tables)[0]}).",
            hint="point TUNA_DB_URL at an empty database, or unset it to use the embedded one",
        )
    return None


def require(engine: sa.Engine, *, embedded: bool) -> None:
    """Make sure that the schema is current: upgrade an embedded database, raise SchemaError for any
    other."""
    found = _quick_revision(engine)
    if found == HEAD:
        return
    found = revision(engine)
    if found == HEAD:  # it was upgraded meanwhile
        return
    _refuse_unknown(engine, found)
    if embedded:
        upgrade(engine)
        return
    state = "is empty" if found is None else f"has schema {found}, this version needs {HEAD}"
    raise SchemaError(
        f"The database {engine.url.render_as_string(hide_password=True)} {state}.",
        hint="run: `tuna db upgrade`",
    )


def check_not_upgraded(engine: sa.Engine) -> None:
    """Raise SchemaError if the schema has been upgraded since `open_database`, or is being
    upgraded."""
    require(engine, embedded=False)
    if engine.dialect.name != "sqlite":  # where a revision and its number are one transaction
        with reading(engine) as connection:
            if connection.execute(sa.text("SELECT IS_USED_LOCK('tuna_schema')")).scalar():
                raise SchemaError(
                    "The database is being upgraded.", hint="start it again after that"
                )


def upgrade(engine: sa.Engine) -> None:
    """Make or upgrade the database to HEAD, safe to call concurrently, and again where a call was
    cut off.

    Raises SchemaError for a schema that is newer, foreign or older than the baseline.
    """
    from alembic import command
    from alembic.config import Config
    from alembic.script import ScriptDirectory

    with reading(engine) as connection, _upgrade_lock(connection):
        current = revision(engine)
        _refuse_unknown(engine, current)
        if current == HEAD:
            return
        config = Config()
        config.set_main_option("script_location", str(migrations_dir()).replace("%", "%%"))
        if current is None:
            _make(connection, ScriptDirectory.from_config(config))
            return
        with _tables_may_be_copied(connection):
            config.attributes["connection"] = connection
            command.upgrade(config, "head")


def _make(connection: sa.Connection, revisions: ScriptDirectory) -> None:
    """Make all tables as the models say, and the only row of `installation`; what an earlier call
    made stays, since MySQL and MariaDB commit each such statement by itself."""
    from alembic.migration import MigrationContext

    from tuna.db.models import Base, Installation

    context = MigrationContext.configure(connection)
    context.stamp(revisions, "base")  # makes the table by which `revision` knows a database of ours
    for table in Base.metadata.sorted_tables:
        table.create(connection, checkfirst=True)
        for index in table.indexes:
            index.create(connection, checkfirst=True)
    if connection.execute(sa.select(Installation.id)).first() is None:
        identity = {"namespace": uuid.uuid4().hex[:12], "secret": secrets.token_hex(32)}
        row = {"id": 1, **identity, "gateway_secret": secrets.token_hex(32)}
        connection.execute(sa.insert(Installation).values(**row))
    context.stamp(revisions, "head")
    connection.commit()


@contextlib.contextmanager
def _tables_may_be_copied(connection: sa.Connection) -> Iterator[None]:
    """SQLite changes a table by copying it; with foreign keys on, dropping the old one deletes all
    that refers to it."""
    if connection.dialect.name != "sqlite":
        yield
        return
    driver = connection.connection.driver_connection
    assert driver is not None
    driver.execute("PRAGMA foreign_keys=OFF")  # without effect within a transaction
    try:
        yield
    finally:
        driver.execute("PRAGMA foreign_keys=ON")


def _quick_revision(engine: sa.Engine) -> str | None:
    """The recorded revision, without inspecting other tables; None if there is none. Raises
    DatabaseError for a server that cannot be used, which need not be asked again."""
    try:
        with reading(engine) as connection:
            return connection.execute(sa.text("SELECT version_num FROM alembic_version")).scalar()
    except DBAPIError:
        return None


def _refuse_unknown(engine: sa.Engine, found: str | None) -> None:
    """Raise SchemaError for a schema that is newer than HEAD or older than the baseline."""
    if found is None or found in KNOWN:
        return
    where = engine.url.render_as_string(hide_password=True)
    if found < KNOWN[0]:
        raise SchemaError(
            f"The database {where} has schema {found}, and this version of Tuna upgrades from "
            f"schema {KNOWN[0]} on.",
            hint="run `tuna db upgrade` of Tuna 0.1.0 at commit e630f606 first, then this one's",
        )
    raise SchemaError(
        f"The database {where} has schema {found}, which is newer than this version of Tuna "
        f"supports ({HEAD}).",
        hint="install the version of Tuna that wrote it, or a newer one",
    )


@contextlib.contextmanager
def _upgrade_lock(connection: sa.Connection) -> Iterator[None]:
    """Mutual exclusion of concurrent upgrades of the same database.

    A MySQL server ends the statement of a client that was killed before it drops the client's
    locks, so the lock is one of the connection that upgrades: otherwise the next upgrade could
    begin beside that statement.
    """
    if connection.dialect.name == "sqlite":
        database = connection.engine.url.database
        if not database or database == ":memory:":
            yield
            return
        with open(os.open(f"{database}.lock", os.O_WRONLY | os.O_CREAT, 0o600), "w") as handle:
            fcntl.flock(handle, fcntl.LOCK_EX)
            yield
        return
    taken = connection.execute(sa.text("SELECT GET_LOCK('tuna_schema', 120)")).scalar()
    connection.commit()
    if taken != 1:
        raise DatabaseError("Another process has been upgrading the database for two minutes.")
    try:
        yield
    finally:
        if not connection.invalidated:
            connection.rollback()
            connection.execute(sa.text("SELECT RELEASE_LOCK('tuna_schema')"))
