"""What people read when a database cannot go on."""

from __future__ import annotations

import pytest
import sqlalchemy as sa

from tuna.db.engine import is_outage, make_engine, reading, writing
from tuna.errors import DatabaseError, StorageFull


def test_a_table_that_is_full_is_said_in_a_sentence(mariadb_url: str) -> None:
    engine = make_engine(mariadb_url)
    with pytest.raises(StorageFull, match="There is no space left for the database mysql"):
        _fill_a_table(engine)
    engine.dispose()


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
