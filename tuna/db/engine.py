"""Database engines and transactions, for SQLite and MySQL/MariaDB."""

from __future__ import annotations

import contextlib
import shutil
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, Concatenate, ParamSpec, TypeVar

import sqlalchemy as sa
from sqlalchemy import event
from sqlalchemy.exc import (
    ArgumentError,
    DBAPIError,
    InterfaceError,
    NoSuchModuleError,
    OperationalError,
)

from tuna.common import files
from tuna.errors import BadInput, DatabaseError, StorageFull

P = ParamSpec("P")
T = TypeVar("T")

_WRITE = "tuna_write"
_MIN_FREE_BYTES = 1 << 17
#: MySQL's 'lock wait timeout' and 'deadlock found': the transaction was rolled back and can be
#: retried.
_RETRY_CODES = frozenset({1205, 1213})
#: MySQL's 'disk full' and 'the table is full'.
_FULL_CODES = frozenset({1021, 1114})
#: MySQL's 'server shutdown in progress', 'cannot connect' (socket, host), 'has gone away', 'lost
#: connection during query', 'too many connections' (of all, of this user, of its share), 'node not
#: ready' (Galera), and 'read only' (twice).
_OUTAGE_CODES = frozenset({1053, 2002, 2003, 2006, 2013, 1040, 1203, 1226, 1047, 1290, 1836})
#: SQL mode that MySQL and MariaDB have by default; a server's own may be ORACLE or ANSI_QUOTES, in
#: which the same statements mean something else
_SQL_MODE = "STRICT_TRANS_TABLES,ERROR_FOR_DIVISION_BY_ZERO,NO_ENGINE_SUBSTITUTION"
#: Error of SQLite when others write for longer than its timeout
_LOCKED = "database is locked"


def make_engine(url: str | sa.URL) -> sa.Engine:
    """An engine for `url`; raises BadInput for a URL that SQLAlchemy cannot use, without repeating
    its password."""
    try:
        parsed = sa.make_url(url)
        if "@" in (parsed.host or ""):
            raise ValueError("an unescaped @ in the password")
        if parsed.get_backend_name() == "sqlite":
            return _sqlite_engine(parsed)
        if parsed.get_backend_name() in ("mysql", "mariadb"):
            return _mysql_engine(parsed)
    except (ArgumentError, NoSuchModuleError, ModuleNotFoundError, ValueError):
        raise BadInput("TUNA_DB_URL is not a usable database URL.", hint=_URL_HINT) from None
    raise BadInput(
        f"Tuna stores its data in SQLite or MySQL/MariaDB, not in {parsed.get_backend_name()}.",
        hint=_URL_HINT,
    )


_URL_HINT = (
    "examples: sqlite:////data/tuna.sqlite, mysql+pymysql://user:password@host/tuna (with @ in a"
    " password as %40)"
)


#: Connections that are kept open where so many were needed at a time.
_POOL = 24


def _sqlite_engine(url: sa.URL) -> sa.Engine:
    if url.database and url.database != ":memory:" and not Path(url.database).parent.is_dir():
        raise DatabaseError(f"The folder of the database {url.database} does not exist.")
    # what has threads has as many connections: each new one opens the file and prepares itself
    engine = sa.create_engine(url, connect_args={"timeout": 60}, pool_size=_POOL)

    @event.listens_for(engine, "connect")
    def _prepare(connection: Any, _record: Any) -> None:
        connection.isolation_level = None  # sqlite3 delays BEGIN; `_begin` emits it instead
        cursor = connection.cursor()
        for pragma in (
            "journal_mode=WAL",
            "synchronous=NORMAL",
            "foreign_keys=ON",
            "busy_timeout=60000",
        ):
            cursor.execute(f"PRAGMA {pragma}")
        cursor.close()

    @event.listens_for(engine, "begin")
    def _begin(connection: sa.Connection) -> None:
        # Upgrading a read transaction to a write fails with SQLITE_BUSY without waiting; BEGIN
        # IMMEDIATE waits.
        write = connection.get_execution_options().get(_WRITE)
        connection.exec_driver_sql("BEGIN IMMEDIATE" if write else "BEGIN")

    return engine


def _mysql_engine(url: sa.URL) -> sa.Engine:
    if url.drivername in ("mysql", "mariadb"):
        url = url.set(drivername=f"{url.drivername}+pymysql")
    # REPEATABLE READ, the default, deadlocks concurrent claimers; READ COMMITTED does not.
    engine = sa.create_engine(
        url,
        isolation_level="READ COMMITTED",
        pool_pre_ping=True,
        pool_recycle=1800,
        connect_args={"charset": "utf8mb4", "sql_mode": _SQL_MODE},
    )
    if url.get_driver_name() == "pymysql":

        @event.listens_for(engine, "do_connect")
        def _connect(_dialect: Any, _record: Any, _words: Any, options: dict[str, Any]) -> Any:
            # imported here, since only servers need it
            from tuna.db.mysql_connection import WatchedConnection

            return WatchedConnection(**options)

    return engine


@contextlib.contextmanager
def reading(engine: sa.Engine) -> Iterator[sa.Connection]:
    """A connection for reading; database errors are translated as in `writing`."""
    with _translated(engine), engine.connect() as connection:
        yield connection


@contextlib.contextmanager
def writing(engine: sa.Engine) -> Iterator[sa.Connection]:
    """A transaction: committed at the end, rolled back by an exception. Raises DatabaseError or
    StorageFull for faults of the server or the disk."""
    with (
        _translated(engine),
        engine.connect().execution_options(**{_WRITE: True}) as connection,
        connection.begin(),
    ):
        yield connection


def transaction(
    engine: sa.Engine,
    work: Callable[Concatenate[sa.Connection, P], T],
    /,
    *args: P.args,
    **kwargs: P.kwargs,
) -> T:
    """Return `work(connection, *args, **kwargs)`, run in a transaction, and again after a MySQL
    deadlock: `work` must bear to be repeated. Raises what `writing` raises."""
    import stamina  # half as long to import as SQLAlchemy, and commands that only read need it not

    def once() -> T:
        with writing(engine) as connection:
            return work(connection, *args, **kwargs)

    caller = stamina.RetryingCaller(attempts=10, timeout=60, wait_initial=0.02, wait_max=1.0)
    return caller(_is_deadlock, once)


class Changes:
    """Notices changes of an SQLite database that other connections make."""

    def __init__(self, engine: sa.Engine) -> None:
        self._engine = engine
        self._connection: sa.Connection | None = None
        self._version: int | None = None
        self._changed_at = 0.0

    def unchanged_s(self) -> float:
        """Seconds since a change was first noticed; 0 for a server, which does not say it."""
        if self._engine.dialect.name != "sqlite":
            return 0.0
        if self._connection is None:
            self._connection = self._engine.connect()  # the number is one connection's
        found = self._connection.exec_driver_sql("PRAGMA data_version").scalar()
        self._connection.rollback()
        if found != self._version:
            self._version, self._changed_at = found, time.monotonic()
        return time.monotonic() - self._changed_at


def is_outage(error: BaseException | None) -> bool:
    """True if the connection was lost or refused, or others held the locks for long: the
    transaction was rolled back and can be retried later."""
    error = error.__cause__ if isinstance(error, DatabaseError) else error
    if not isinstance(error, DBAPIError):
        return False
    passing = _code(error) in _OUTAGE_CODES | _RETRY_CODES or _LOCKED in str(error.orig)
    return error.connection_invalidated or passing


def _code(error: DBAPIError) -> Any:
    return getattr(error.orig, "args", (None,))[0]


def _is_deadlock(error: Exception) -> bool:
    return isinstance(error, DBAPIError) and _code(error) in _RETRY_CODES


@contextlib.contextmanager
def _translated(engine: sa.Engine) -> Iterator[None]:
    """Translate errors that a user can act on (no file, no server, disk full) into one sentence;
    others pass through."""
    try:
        yield
    except DBAPIError as error:
        text = str(error.orig)
        where = engine.url.render_as_string(hide_password=True)
        if _is_full(error) or ("disk I/O error" in text and _disk_is_full(engine)):
            raise StorageFull(f"No space is left for the database {where}.") from error
        if _is_unusable(engine, error, text):
            raise DatabaseError(f"The database {where} cannot be used: {_reason(text)}.") from error
        raise


def _is_full(error: DBAPIError) -> bool:
    return _code(error) in _FULL_CODES or (error.orig is not None and files.is_full(error.orig))


def _disk_is_full(engine: sa.Engine) -> bool:
    """True if the disk is full; SQLite reports that as an I/O error when it cannot even extend its
    shared-memory file."""
    folder = Path(engine.url.database or ".").parent
    return folder.is_dir() and shutil.disk_usage(folder).free < _MIN_FREE_BYTES


def _is_unusable(engine: sa.Engine, error: DBAPIError, text: str) -> bool:
    """True if the database refuses connections or work, whatever the statement.

    PyMySQL's class OperationalError has each number of a server that is not one of a statement or a
    value (PEP 249: errors "not necessarily under the control of the programmer"), and all of its
    own; a victim of a deadlock is excepted, whose transaction is repeated. SQLite's class of that
    name has wrong statements too, so its texts decide.
    """
    if engine.dialect.name != "sqlite":
        return (
            isinstance(error, OperationalError | InterfaceError)
            and _code(error) not in _RETRY_CODES
        )
    signs = (
        "not a database",
        "malformed",
        "unable to open",
        "readonly",
        "disk I/O error",
        "attempt to write",
        _LOCKED,
    )
    return any(sign in text for sign in signs)


def _reason(text: str) -> str:
    return text.strip().strip("()").rstrip(".")
