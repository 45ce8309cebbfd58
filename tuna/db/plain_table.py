"""Tables without the ORM models: importing those and configuring their mappers takes as long as all
of a command that reads a few rows."""

from __future__ import annotations

from typing import Any

import sqlalchemy as sa

#: In MySQL 9, which SQLAlchemy does not know yet.
_RESERVED = {"library": True}


def plain_table(name: str, columns: str, **typed: Any) -> sa.TableClause:
    """A table with `columns` and those that are `typed`: a type that converts values."""
    names = [sa.quoted_name(column, _RESERVED.get(column)) for column in columns.split()]
    given: list[sa.ColumnClause[Any]] = [sa.column(column) for column in names]
    return sa.table(name, *given, *(sa.column(*each) for each in typed.items()))
