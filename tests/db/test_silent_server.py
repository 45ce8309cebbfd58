"""A database that accepts connections and stays silent is named within seconds, and one at work on
a long statement is waited for."""

from __future__ import annotations

import os
import signal
import socket
from collections.abc import Iterator
from pathlib import Path

import pytest
import sqlalchemy as sa
from private_servers import mariadb_server, wait_until
from shared_data import needed_program

from tuna.db import database, mysql_connection
from tuna.db.engine import is_outage, make_engine, reading
from tuna.errors import DatabaseError


@pytest.fixture()
def impatient(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(mysql_connection, "SILENCE_S", 0.2)


@pytest.fixture(scope="module")
def server() -> Iterator[str]:
    needed_program("mariadb-install-db")
    with mariadb_server() as url:
        yield url


def _process(engine: sa.Engine) -> int:
    with reading(engine) as connection:
        return int(Path(connection.exec_driver_sql("SELECT @@pid_file").scalar_one()).read_text())


def _stopped(process: int) -> bool:
    """Whether every thread is."""
    threads = Path(f"/proc/{process}/task").glob("*/stat")
    return all(stat.read_text().rpartition(")")[2].split()[0] == "T" for stat in threads)


def test_a_database_that_takes_connections_and_says_nothing_is_named(impatient: None) -> None:
    with socket.create_server(("127.0.0.1", 0)) as silent:
        port = silent.getsockname()[1]
        engine = make_engine(f"mysql+pymysql://tuna:secret@127.0.0.1:{port}/tuna")
        with pytest.raises(
            DatabaseError, match=f"127.0.0.1:{port}/tuna cannot.*no answer"
        ) as error:
            with reading(engine):
                pass
    assert is_outage(error.value)
    assert "secret" not in str(error.value)


@pytest.mark.service
def test_a_statement_that_a_stopped_server_does_not_answer_is_an_outage(
    impatient: None, server: str
) -> None:
    engine = make_engine(server)
    process = _process(engine)
    with reading(engine) as connection:
        os.kill(process, signal.SIGSTOP)
        wait_until(lambda: _stopped(process), 60.0)  # a thread may answer until then
        try:
            with pytest.raises(sa.exc.OperationalError, match="nor to another connection") as lost:
                connection.exec_driver_sql("SELECT 1")
            assert is_outage(lost.value)
        finally:
            os.kill(process, signal.SIGCONT)
    with reading(engine) as connection:
        assert connection.exec_driver_sql("SELECT 1").scalar() == 1, "a new connection is made"


@pytest.mark.service
def test_a_statement_that_takes_long_is_waited_for(impatient: None, server: str) -> None:
    with reading(make_engine(server)) as connection:
        slept = connection.exec_driver_sql("SELECT SLEEP(0.7), 'done'").one()
    assert tuple(slept) == (0, "done")


@pytest.mark.service
def test_a_large_answer_is_read_whole(server: str) -> None:
    with reading(make_engine(server)) as connection:
        text = connection.exec_driver_sql("SELECT REPEAT('x', 3000000)").scalar_one()
    assert len(text) == 3_000_000


def test_a_silent_database_is_asked_for_its_schema_once(
    impatient: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(database, "revision", lambda _: pytest.fail("asked again"))
    with socket.create_server(("127.0.0.1", 0)) as silent:
        url = f"mysql+pymysql://tuna:secret@127.0.0.1:{silent.getsockname()[1]}/tuna"
        with pytest.raises(DatabaseError, match="no answer"):
            database.require(make_engine(url), embedded=False)
