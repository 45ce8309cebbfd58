"""Statements about many rows: pages, IN lists in parts, upserts, and rows as JSON text.

JSON is read and written by C code: PyMySQL converts each value of each row in Python, and that was
half of a coordinator's CPU time. It is for numbers and text: JSON has neither dates nor bytes, and
servers round its floats.
"""

from __future__ import annotations

import functools
import json
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from datetime import datetime
from typing import Any, Generic, TypeVar

import sqlalchemy as sa
from sqlalchemy.dialects import mysql, sqlite

from tuna.db.types import naive_utc


def upsert(
    connection: sa.Connection,
    table: sa.FromClause | type[Any],
    rows: Sequence[Mapping[str, Any]],
    *,
    key: Sequence[str],
    update: Sequence[str] = (),
    keep_if_null: Sequence[str] = (),
    replace: bool = False,
) -> None:
    """Insert `rows`; where the unique `key` exists, set `update` (`replace`: all columns of the
    rows), and set `keep_if_null` unless the new value is NULL.

    With nothing to update, an existing row is left unchanged.
    """
    if not rows:
        return
    target = sa.inspect(table).local_table if isinstance(table, type) else table
    assert isinstance(target, sa.Table)
    if replace:
        update = [name for name in rows[0] if name not in (*key, *keep_if_null)]
    statement = _statement(
        target, connection.dialect.name, tuple(key), tuple(update), tuple(keep_if_null)
    )
    connection.execute(statement, list(rows))


@functools.lru_cache(maxsize=256)  # to build it costs more than to run it
def _statement(
    target: sa.Table,
    dialect: str,
    key: Sequence[str],
    update: Sequence[str],
    keep_if_null: Sequence[str],
) -> sa.Insert:
    if dialect == "sqlite":
        insert = sqlite.insert(target)
        values: dict[str, Any] = {name: insert.excluded[name] for name in update}
        values |= {
            name: sa.func.coalesce(insert.excluded[name], target.c[name]) for name in keep_if_null
        }
        if values:
            return insert.on_conflict_do_update(index_elements=list(key), set_=values)
        return insert.on_conflict_do_nothing(index_elements=list(key))
    other = mysql.insert(target)
    values = {name: other.inserted[name] for name in update}
    values |= {
        name: sa.func.coalesce(other.inserted[name], target.c[name]) for name in keep_if_null
    }
    # Assigning the key to itself is a no-op which, unlike INSERT IGNORE, hides no other error.
    return other.on_duplicate_key_update(values or {key[0]: target.c[key[0]]})


T = TypeVar("T")


@dataclass(frozen=True)
class RowPage(Generic[T]):
    """Rows of a list, and where the list goes on."""

    rows: tuple[T, ...]
    #: cursor of the next page: the id of the last of these rows, or another one; None: this is the
    #: last page
    next: Any

    def map(self, change: Callable[[T], Any]) -> RowPage[Any]:
        """Return the page with each row changed."""
        return RowPage(tuple(map(change, self.rows)), self.next)

    @classmethod
    def of(cls, rows: Sequence[Any], limit: int) -> RowPage[Any]:
        """Return the first `limit` of rows, of which one more was read."""
        kept = tuple(rows[:limit])
        return cls(kept, kept[-1].id if len(rows) > limit else None)


#: Maximum of rows named in one IN list; SQLite allows 32,766 parameters in a statement
IN_LIST = 5000


def parts(values: Sequence[T]) -> Iterable[Sequence[T]]:
    """`values` in lists that one statement can name."""
    return (values[start : start + IN_LIST] for start in range(0, len(values), IN_LIST))


def rows_among(
    connection: sa.Connection,
    query: Any,
    column: sa.SQLColumnExpression[Any],
    values: Iterable[Any],
) -> Iterator[Any]:
    """The rows of a `sa.Select` whose `column` has one of the `values`, whatever their number."""
    for part in parts(sorted(values)):
        yield from connection.execute(query.where(column.in_(part)))


def values_among(
    connection: sa.Connection,
    query: Any,
    column: sa.SQLColumnExpression[Any],
    values: Iterable[Any],
) -> set[Any]:
    """The values of a query of one column, as `rows_among` has its rows."""
    return {row[0] for row in rows_among(connection, query, column, values)}


def packed(columns: Iterable[sa.ColumnElement[Any]]) -> sa.ColumnElement[str]:
    """A JSON array of `columns`, to be selected alone and read by `unpacked`; a JSON column is text
    in it."""
    texts = (
        sa.cast(column, sa.Text) if isinstance(column.type, sa.JSON) else column
        for column in columns
    )
    return sa.func.json_array(*texts, type_=sa.Text)


def unpacked(
    connection: sa.Connection, query: sa.Select[Any], values: Mapping[str, Any] | None = None
) -> list[list[Any]]:
    """The rows of a query of one `packed` column."""
    rows: list[list[Any]] = json.loads(
        f"[{','.join(connection.execute(query, values or {}).scalars().all())}]"
    )
    return rows


def insert(connection: sa.Connection, model: type[Any], rows: Sequence[Mapping[str, Any]]) -> None:
    """Insert `rows`, which name the same columns, by one parameter of the statement."""
    if not rows:
        return
    table = sa.inspect(model).local_table
    text = json.dumps(
        [[*row.values()] for row in rows], default=_date, ensure_ascii=False, allow_nan=False
    )
    connection.execute(
        _insert(table, tuple(rows[0]), connection.dialect.name), {"packed_rows": text}
    )


@functools.lru_cache(maxsize=256)  # to build it costs more than to run it
def _insert(table: sa.FromClause, names: tuple[str, ...], dialect: str) -> sa.Insert:
    assert isinstance(table, sa.Table)
    columns = [table.c[name] for name in names]
    found = _each(columns) if dialect == "sqlite" else _table(columns)
    return sa.insert(table).from_select(columns, found, include_defaults=False)


_ROWS: sa.BindParameter[str] = sa.bindparam("packed_rows", type_=sa.Text)


def _each(columns: Sequence[sa.Column[Any]]) -> sa.Select[Any]:
    value = sa.func.json_each(_ROWS).table_valued("value").c.value
    return sa.select(
        *(sa.func.json_extract(value, f"$[{number}]") for number in range(len(columns)))
    )


def _table(columns: Sequence[sa.Column[Any]]) -> sa.Select[Any]:
    # JSON_TABLE gives NULL for what does not fit its types; the widest leave that to the INSERT,
    # which refuses it.
    paths = ", ".join(
        f"c{number} {_type(column)} PATH '$[{number}]'" for number, column in enumerate(columns)
    )
    shape: sa.ColumnElement[Any] = sa.literal_column(f"'$[*]' COLUMNS ({paths})")
    found = sa.func.json_table(_ROWS, shape).table_valued(
        *(f"c{number}" for number in range(len(columns)))
    )
    return sa.select(*found.c)


def _type(column: sa.Column[Any]) -> str:
    if isinstance(column.type, sa.Integer | sa.Boolean):
        return "BIGINT"
    return "DOUBLE" if isinstance(column.type, sa.Float) else "LONGTEXT CHARACTER SET utf8mb4"


def _date(value: datetime) -> str:
    return naive_utc(value).isoformat(" ", "microseconds")
