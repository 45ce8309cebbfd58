"""Each refusal of a MySQL or MariaDB server is one sentence that names the database."""

from __future__ import annotations

import contextlib
import struct
from collections.abc import Iterator

import pymysql
import pytest
import sqlalchemy as sa

from tuna.db import engine as engine_module
from tuna.db.engine import make_engine, reading
from tuna.errors import DatabaseError, StorageFull

URL = "mysql+pymysql://tuna:secret@db.example/tuna"
#: Of logins and of servers that are full, ending, read-only, broken or configured in another way.
REFUSALS = (
    *(1040, 1042, 1043, 1044, 1045, 1047, 1049, 1053, 1129, 1130, 1142, 1159, 1161, 1184, 1203),
    *(1226, 1251, 1290, 1317, 1396, 1698, 1820, 1836, 1862, 1927, 1969, 3118, 3159, 4151, 4165),
)


@contextlib.contextmanager
def _failing(engine: sa.Engine, code: int) -> Iterator[None]:
    """A block of the engine in which a statement gets this answer."""
    with engine_module._translated(engine):
        yield
        try:
            pymysql.err.raise_mysql_exception(_answer(code))
        except pymysql.MySQLError as error:
            raise sa.exc.DBAPIError.instance(
                "SELECT 1", {}, error, pymysql.Error, dialect=engine.dialect
            ) from error


def _answer(code: int) -> bytes:
    """An error packet of the server."""
    return b"\xff" + struct.pack("<H", code) + b"#HY000" + b"the server refuses"


@pytest.mark.parametrize("code", REFUSALS)
def test_a_refused_login_is_a_sentence(code: int, monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(_self: object, _sock: object = None) -> None:
        pymysql.err.raise_mysql_exception(_answer(code))

    monkeypatch.setattr(pymysql.connections.Connection, "connect", refuse)
    with pytest.raises(DatabaseError, match=r"cannot be used: .*refuses") as error:
        with reading(make_engine(URL)):
            pass
    assert "db.example" in str(error.value)
    assert "secret" not in str(error.value)


@pytest.mark.parametrize("code", [*sorted({*REFUSALS} - {1044, 1049}), 1021, 1114])
def test_a_refused_statement_is_a_sentence(code: int) -> None:
    engine = make_engine(URL)
    with pytest.raises((DatabaseError, StorageFull)), _failing(engine, code):
        pass


@pytest.mark.parametrize(
    ("code", "kind"),
    [
        (1064, sa.exc.ProgrammingError),
        (1062, sa.exc.IntegrityError),
        (1406, sa.exc.DataError),
        (1213, sa.exc.OperationalError),
    ],
)
def test_a_fault_of_a_statement_or_value_stays_what_it_is(code: int, kind: type[Exception]) -> None:
    with pytest.raises(kind), _failing(make_engine(URL), code):
        pass


def test_a_login_that_needs_a_package_is_a_sentence(monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(_self: object, _sock: object = None) -> None:
        raise RuntimeError("'pynacl' package is required for ed25519_password auth method")

    monkeypatch.setattr(pymysql.connections.Connection, "connect", refuse)
    with pytest.raises(DatabaseError, match="'pynacl' package is required"):
        with reading(make_engine(URL)):
            pass


@pytest.mark.service
def test_a_server_in_oracle_mode_is_used_as_any_other(mariadb_url: str) -> None:
    with make_engine(mariadb_url).begin() as connection:
        connection.exec_driver_sql("SET GLOBAL sql_mode = 'ORACLE'")
    try:
        with make_engine(mariadb_url).begin() as connection:
            assert "ORACLE" not in connection.exec_driver_sql("SELECT @@sql_mode").scalar_one()
    finally:
        with make_engine(mariadb_url).begin() as connection:
            connection.exec_driver_sql("SET GLOBAL sql_mode = DEFAULT")
