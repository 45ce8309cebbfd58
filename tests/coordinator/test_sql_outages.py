"""Errors of SQL are told apart; a coordinator waits for those that pass, a full disk among them."""

from __future__ import annotations

import sqlite3
from collections.abc import Callable
from typing import Any

import pymysql
import pytest
import sqlalchemy as sa
from jobs_builder import accepted, states
from sqlalchemy import event
from sqlalchemy.exc import DataError, InternalError, OperationalError, ProgrammingError
from test_coordinator import JOBS, make

from tuna.coordinator.coordinator import Coordinator
from tuna.db import server_errors
from tuna.db.engine import make_engine, reading
from tuna.db.server_errors import ErrorKind
from tuna.errors import TunaError

_ = make
#: By what they are, as drivers raise them.
ERRORS: dict[ErrorKind, list[tuple[type[Any], Exception]]] = {
    ErrorKind.OUTAGE: [
        (
            OperationalError,
            pymysql.err.OperationalError(2013, "Lost connection to MySQL server during query"),
        ),
        (OperationalError, pymysql.err.OperationalError(1040, "Too many connections")),
        (
            OperationalError,
            pymysql.err.OperationalError(
                1290, "The MariaDB server is running with the --read-only option"
            ),
        ),
        (OperationalError, pymysql.err.OperationalError(1836, "Running in read-only mode")),
        (
            OperationalError,
            pymysql.err.OperationalError(
                1205, "Lock wait timeout exceeded; try restarting transaction"
            ),
        ),
        (
            OperationalError,
            pymysql.err.OperationalError(1213, "Deadlock found when trying to get lock"),
        ),
        (OperationalError, sqlite3.OperationalError("database is locked")),
    ],
    ErrorKind.FULL: [
        (OperationalError, pymysql.err.OperationalError(1114, "The table 'trial' is full")),
        (
            InternalError,
            pymysql.err.InternalError(
                1030, 'Got error 28 "No space left on device" from storage engine'
            ),
        ),
        (
            InternalError,
            pymysql.err.InternalError(
                1026, "Error writing file 'x' (errno: 122 \"Disk quota exceeded\")"
            ),
        ),
        (OperationalError, sqlite3.OperationalError("database or disk is full")),
    ],
    ErrorKind.REFUSED: [
        (DataError, pymysql.err.DataError(1406, "Data too long for column 'params'"))
    ],
    ErrorKind.BUG: [
        (
            ProgrammingError,
            pymysql.err.ProgrammingError(1064, "You have an error in your SQL syntax"),
        ),
        (OperationalError, pymysql.err.OperationalError(1045, "Access denied for user")),
        (OperationalError, sqlite3.OperationalError("no such column: x")),
    ],
}


@pytest.mark.parametrize(
    ("kind", "raised"), [(kind, one) for kind, found in ERRORS.items() for one in found]
)
def test_errors_of_the_database_are_told_apart(
    kind: ErrorKind, raised: tuple[type[Any], Exception]
) -> None:
    engine = make_engine("sqlite://")
    wrapper, original = raised
    with pytest.raises((TunaError, sa.exc.DBAPIError)) as caught, reading(engine):
        raise wrapper("SELECT 1", {}, original)
    assert server_errors.kind(caught.value) is kind
    assert server_errors.is_passing(caught.value) is (kind in (ErrorKind.OUTAGE, ErrorKind.FULL))


@pytest.mark.parametrize("engine", ["sqlite"], indirect=True)
def test_a_coordinator_waits_until_there_is_space_in_the_database(
    engine: sa.Engine, make: Callable[[], Coordinator]
) -> None:
    """It ended, and with it every session."""
    coordinator = make()
    refused: list[str] = []

    def limit(connection: sqlite3.Connection, *_: object) -> None:
        connection.execute(f"PRAGMA max_page_count = {1 if len(refused) < 3 else 2**31 - 2}")

    event.listen(engine, "checkout", limit)
    event.listen(
        engine, "handle_error", lambda context: refused.append(str(context.original_exception))
    )
    coordinator.run(lambda: None, lambda: states(engine) == {"evaluated": JOBS})
    assert refused[:3] == ["database or disk is full"] * 3
    assert {count for *_, count in accepted(engine)} == {1}
    assert len(accepted(engine)) == 2 * JOBS
