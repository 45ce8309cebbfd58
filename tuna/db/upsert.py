"""Bulk upsert (insert or update), whose syntax differs between SQLite and MySQL."""

from __future__ import annotations

import functools
from collections.abc import Mapping, Sequence
from typing import Any

import sqlalchemy as sa
from sqlalchemy.dialects import mysql, sqlite


def upsert(
    connection: sa.Connection,
    table: sa.FromClause | type[Any],
    rows: Sequence[Mapping[str, Any]],
    *,
    key: Sequence[str],
    update: Sequence[str] = (),
    keep_if_null: Sequence[str] = (),
) -> None:
    """Insert `rows`; where the unique `key` exists, set `update`, and set `keep_if_null` unless the
    new value is NULL.

    With nothing to update, an existing row is left unchanged.
    """
    if not rows:
        return
    target = sa.inspect(table).local_table if isinstance(table, type) else table
    assert isinstance(target, sa.Table)
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
