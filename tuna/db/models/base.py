"""The base of the ORM models: the declarative class, naming of constraints, portable column
types."""

from __future__ import annotations

from datetime import datetime
from typing import Any

import sqlalchemy as sa
from sqlalchemy.orm import DeclarativeBase, Mapped, mapped_column

from tuna.db.types import Double, UtcDateTime

_NAMING = {
    "ix": "ix_%(table_name)s_%(column_0_N_name)s",
    "uq": "uq_%(table_name)s_%(column_0_N_name)s",
    "fk": "fk_%(table_name)s_%(column_0_name)s",
    "pk": "pk_%(table_name)s",
}
#: Binary collation: MySQL's default is case-insensitive and would make tag `A` and tag `a` equal.
TABLE_OPTIONS = {
    "mysql_engine": "InnoDB",
    "mysql_charset": "utf8mb4",
    "mysql_collate": "utf8mb4_bin",
}


class Base(DeclarativeBase):
    """Root of the models."""

    metadata = sa.MetaData(naming_convention=_NAMING)
    type_annotation_map = {  # noqa: RUF012
        datetime: UtcDateTime(),
        float: Double,
        dict[str, Any]: sa.JSON(),
    }
    __table_args__: Any = TABLE_OPTIONS


def table(*constraints: sa.schema.SchemaItem) -> tuple[Any, ...]:
    """`__table_args__` with these constraints."""
    return (*constraints, TABLE_OPTIONS)


def text(length: int, **options: Any) -> Mapped[Any]:
    """A column of at most `length` characters."""
    return mapped_column(sa.String(length), **options)


def owner(key: str, **options: Any) -> Mapped[Any]:
    """A column with the key of another row, such as `session.id`, which this one is deleted
    with."""
    return mapped_column(sa.ForeignKey(key, ondelete="CASCADE"), **options)


def library_column() -> Mapped[Any]:
    """The column `library`, quoted."""
    return mapped_column("library", sa.String(64), quote=True)  # a reserved word of MySQL 9
