"""Transactions: retries after deadlocks, and the sentences for a database that cannot go on."""

from __future__ import annotations

import threading
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest
import sqlalchemy as sa
from queries import execute, read_column, read_value
from sqlalchemy import event

from tuna.db import database
from tuna.db.engine import is_outage, make_engine, reading, transaction, writing
from tuna.errors import DatabaseError, StorageFull


def test_a_table_that_is_full_is_said_in_a_sentence(mariadb_url: str) -> None:
    engine = make_engine(mariadb_url)
    with pytest.raises(StorageFull, match="No space is left for the database mysql"):
        _fill_a_table(engine)
    engine.dispose()


@pytest.mark.parametrize("pages", [1, 20, 60])
def test_a_disk_that_is_full_while_tables_are_made_is_said_in_a_sentence(
    tmp_path: Path, pages: int
) -> None:
    engine = make_engine(f"sqlite:///{tmp_path / 'little.sqlite'}")
    event.listen(engine, "connect", lambda db, _: db.execute(f"PRAGMA max_page_count = {pages}"))
    with pytest.raises(StorageFull, match="No space is left for the database sqlite") as full:
        database.upgrade(engine)
    assert full.value.hint == "free some space and run it again"
    engine.dispose()
    again = make_engine(engine.url)  # there is space again
    database.upgrade(again)
    assert database.revision(again) == database.HEAD
    again.dispose()


def _fill_a_table(engine: sa.Engine) -> None:
    with writing(engine) as connection:
        connection.execute(sa.text("SET max_heap_table_size = 16384"))
        connection.execute(
            sa.text("CREATE TEMPORARY TABLE little (text CHAR(255)) ENGINE = MEMORY")
        )
        for _ in range(1000):
            connection.execute(
                sa.text("INSERT INTO little VALUES ('x'), ('x'), ('x'), ('x'), ('x'), ('x'), ('x')")
            )


def test_a_server_that_has_no_connection_left_is_waited_for(mariadb_url: str) -> None:
    admin = make_engine(mariadb_url)
    with admin.begin() as connection:
        connection.execute(
            sa.text("CREATE OR REPLACE USER one@localhost WITH MAX_USER_CONNECTIONS 1")
        )
    url = sa.make_url(mariadb_url).set(username="one", database="")
    first, second = (make_engine(url.render_as_string(hide_password=False)) for _ in range(2))
    with (
        reading(first),
        pytest.raises(DatabaseError, match="cannot be used") as caught,
        reading(second),
    ):
        pass
    assert is_outage(caught.value)
    for engine in (admin, first, second):
        engine.dispose()


def test_a_transaction_returns_and_commits_what_its_work_did(empty_engine: sa.Engine) -> None:
    def insert(connection: sa.Connection, first: int, *, second: int) -> int:
        connection.execute(sa.text("CREATE TABLE one (id INTEGER PRIMARY KEY)"))
        statement = sa.text("INSERT INTO one VALUES (:id)")
        return connection.execute(statement, [{"id": first}, {"id": second}]).rowcount

    assert transaction(empty_engine, insert, 1, second=2) == 2
    assert read_column(empty_engine, sa.text("SELECT id FROM one ORDER BY id")) == [
        1,
        2,
    ]


def test_a_transaction_is_rolled_back_and_not_repeated_for_an_error_of_its_work(
    empty_engine: sa.Engine,
) -> None:
    execute(empty_engine, sa.text("CREATE TABLE one (id INTEGER PRIMARY KEY)"))
    runs = []

    def fail(connection: sa.Connection) -> None:
        runs.append(connection.execute(sa.text("INSERT INTO one VALUES (1)")).rowcount)
        raise KeyError("of the work")

    with pytest.raises(KeyError, match="of the work"):
        transaction(empty_engine, fail)
    assert runs == [1]
    assert read_value(empty_engine, sa.text("SELECT COUNT(*) FROM one")) == 0


def test_the_victim_of_a_deadlock_runs_its_transaction_again(mariadb_url: str) -> None:
    engine = make_engine(mariadb_url)
    with writing(engine) as connection:
        connection.execute(sa.text("CREATE TABLE pair (id INTEGER PRIMARY KEY, n INTEGER)"))
        connection.execute(sa.text("INSERT INTO pair VALUES (1, 0), (2, 0)"))
    both = threading.Barrier(2)
    runs: list[int] = []

    def add(connection: sa.Connection, ids: tuple[int, int]) -> None:
        runs.append(ids[0])
        statement = sa.text("UPDATE pair SET n = n + 1 WHERE id = :id")
        connection.execute(statement, {"id": ids[0]})
        if runs.count(ids[0]) == 1:
            both.wait(60)  # each holds its first row: one of the two is chosen as the victim
        connection.execute(statement, {"id": ids[1]})

    with ThreadPoolExecutor(2) as pool:
        for one in [pool.submit(transaction, engine, add, ids) for ids in ((1, 2), (2, 1))]:
            one.result()
    assert len(runs) == 3
    assert read_column(engine, sa.text("SELECT n FROM pair")) == [2, 2]
    engine.dispose()
