"""One statement in a transaction of its own: what it reads, or that it is committed."""

from __future__ import annotations

from typing import Any

import sqlalchemy as sa

from tuna.db.engine import reading, writing


def read_rows(engine: sa.Engine, query: sa.Executable) -> list[Any]:
    """All rows of a query."""
    with reading(engine) as connection:
        return list(connection.execute(query).all())


def read_row(engine: sa.Engine, query: sa.Executable) -> Any:
    """The only row of a query."""
    (row,) = read_rows(engine, query)
    return row


def read_column(engine: sa.Engine, query: sa.Executable) -> list[Any]:
    """The first column of a query."""
    return [row[0] for row in read_rows(engine, query)]


def read_value(engine: sa.Engine, query: sa.Executable) -> Any:
    """The only value of a query."""
    (value,) = read_column(engine, query)
    return value


def execute(engine: sa.Engine, statement: sa.Executable, *values: Any) -> None:
    """Execute a statement and commit."""
    with writing(engine) as connection:
        connection.execute(statement, *values)
