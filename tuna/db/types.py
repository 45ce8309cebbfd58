"""Column types that behave the same on SQLite and on MySQL/MariaDB, and tables of them without the
ORM models."""

from __future__ import annotations

from datetime import datetime, timezone
from typing import Any

import sqlalchemy as sa
from sqlalchemy.dialects import mysql

from tuna.libraries.results import LONGEST_MS, SHORTEST_MS


def timed(time_ms: sa.SQLColumnExpression[Any]) -> sa.ColumnElement[bool]:
    """Return the condition that a column holds a time which a run can have taken, as
    `libraries.results.is_time` has it."""
    return time_ms.between(SHORTEST_MS, LONGEST_MS)


def utc_now() -> datetime:
    """The current time as an aware datetime in UTC."""
    return datetime.now(timezone.utc)


def naive_utc(value: datetime) -> datetime:
    """`value` in UTC, as both databases store it. Naive datetimes raise ValueError: their zone is
    unknown."""
    if value.tzinfo is None:
        raise ValueError("a datetime without a time zone")
    return value.astimezone(timezone.utc).replace(tzinfo=None)


def from_epoch(seconds: float) -> datetime | None:
    """Seconds since the epoch as UTC; None for 0, which means unknown."""
    return datetime.fromtimestamp(seconds, timezone.utc) if seconds else None


class UtcDateTime(sa.types.TypeDecorator[datetime]):
    """A timestamp in UTC with microseconds. Naive datetimes raise ValueError: their zone is
    unknown."""

    impl = sa.DateTime
    cache_ok = True

    def load_dialect_impl(self, dialect: sa.Dialect) -> sa.types.TypeEngine[Any]:
        """DATETIME(6) on MySQL, whose default truncates to seconds."""
        if dialect.name in ("mysql", "mariadb"):
            return dialect.type_descriptor(mysql.DATETIME(fsp=6))
        return dialect.type_descriptor(sa.DateTime())

    def process_bind_param(self, value: datetime | None, dialect: sa.Dialect) -> datetime | None:
        """Convert to naive UTC, which is what both databases store."""
        return None if value is None else naive_utc(value)

    def process_result_value(self, value: datetime | None, dialect: sa.Dialect) -> datetime | None:
        """Mark the stored value as UTC."""
        return None if value is None else value.replace(tzinfo=timezone.utc)


#: Text without a practical limit (MySQL's TEXT ends at 64 KiB).
LongText = sa.Text().with_variant(mysql.LONGTEXT(), "mysql", "mariadb")
#: Bytes without a practical limit (MySQL's BLOB ends at 64 KiB).
LongBlob = sa.LargeBinary().with_variant(mysql.LONGBLOB(), "mysql", "mariadb")
#: Double precision: MySQL's FLOAT keeps 6 digits and would round times before they are exported.
Double: sa.types.TypeEngine[float] = sa.Double()
#: A 64-bit id; SQLite's rowid needs INTEGER.
BigId = sa.BigInteger().with_variant(sa.Integer(), "sqlite")


#: Reserved words of MySQL 9 that SQLAlchemy does not know yet
_RESERVED = {"library": True}


def plain_table(name: str, columns: str, **typed: Any) -> sa.TableClause:
    """A table with `columns` and those that are `typed`: a type that converts values."""
    names = [sa.quoted_name(column, _RESERVED.get(column)) for column in columns.split()]
    given: list[sa.ColumnClause[Any]] = [sa.column(column) for column in names]
    return sa.table(name, *given, *(sa.column(*each) for each in typed.items()))


_MARKS = plain_table("config_tag", "tag config_id")


def tagged(config_id: sa.SQLColumnExpression[int], tag: str | None) -> sa.ColumnElement[bool]:
    """The condition on a column that its config carries the tag; None: no condition."""
    if tag is None:
        return sa.true()
    return config_id.in_(sa.select(_MARKS.c.config_id).where(_MARKS.c.tag == tag))
