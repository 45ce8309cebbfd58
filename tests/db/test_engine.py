"""What people read when a database cannot go on."""

from __future__ import annotations

import pytest
import sqlalchemy as sa

from tuna.db.engine import make_engine, writing
from tuna.errors import StorageFull


def test_a_table_that_is_full_is_said_in_a_sentence(mariadb_url: str) -> None:
    engine = make_engine(mariadb_url)
    with pytest.raises(StorageFull, match="There is no space left for the database mysql"):
        _fill_a_table(engine)
    engine.dispose()


def _fill_a_table(engine: sa.Engine) -> None:
    with writing(engine) as connection:
        connection.execute(sa.text("SET max_heap_table_size = 16384"))
        connection.execute(sa.text("CREATE TEMPORARY TABLE little (text CHAR(255)) ENGINE = MEMORY"))
        for _ in range(1000):
            connection.execute(sa.text("INSERT INTO little VALUES ('x'), ('x'), ('x'), ('x'), ('x'), ('x'), ('x')"))
