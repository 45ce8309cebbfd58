"""Dead letters: reports that were taken from the stream and could not be drained, in SQL with their
bytes and the reason.

There are two kinds. A report about a session whose library is not installed here waits for a
coordinator that has it. A report that is malformed, or that the database refused, is kept for a
person to look at.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

import sqlalchemy as sa
import structlog

from tuna.db.models import DeadLetter
from tuna.db.types import utc_now
from tuna.drain.find_db_writer import fits
from tuna.libraries.registry import find_library
from tuna.queue.messages import Report

log = structlog.get_logger(__name__)

#: Bytes of a malformed report that are kept, and how many such reports: workers must not be able to
#: fill the database.
KEPT_BYTES, KEPT = 1 << 20, 1000


@dataclass(frozen=True)
class Letter:
    """A report that could not be drained; `library` is the one that is missing here, empty if that
    is not the reason."""

    fault: str
    body: bytes
    library: str = ""
    session_id: int | None = None


def keep(connection: sa.Connection, letters: Iterable[Letter]) -> None:
    """Store the letters; of those for a person only the first ones, each up to a limit."""
    for letter in letters:
        if not letter.library and _of_no_library(connection) >= KEPT:
            continue
        body = letter.body if letter.library else letter.body[:KEPT_BYTES]
        connection.execute(
            sa.insert(DeadLetter).values(
                library=letter.library,
                session_id=letter.session_id,
                fault=letter.fault,
                body=body,
                created_at=utc_now(),
            )
        )


def fitting(connection: sa.Connection, report: Report) -> list[Report]:
    """The report in parts that the database takes: of one result each, a failure in the place of
    one that is too long."""
    size_bytes = len(report.to_json())
    if fits(connection, size_bytes):
        return [report]
    if len(report.results) > 1:
        return [part for one in report.parts() if one.results for part in fitting(connection, one)]
    text = (
        f"The result has {size_bytes} bytes, more than the database takes: set its"
        " max_allowed_packet to 256M."
    )
    log.error("result too long for the database", worker=report.worker, size_bytes=size_bytes)
    return [report.failed(text)]


def for_installed_libraries(connection: sa.Connection, limit: int) -> dict[int, Report]:
    """Up to `limit` reports, by their letter's id, that waited for a library which is installed
    here."""
    names = connection.execute(
        sa.select(DeadLetter.library).where(DeadLetter.library != "").distinct()
    ).scalars()
    here = [name for name in names if find_library(name) is not None]
    if not here:
        return {}
    query = (
        sa.select(DeadLetter.id, DeadLetter.body)
        .where(DeadLetter.library.in_(here))
        .order_by(DeadLetter.id)
    )
    return {
        row.id: Report.model_validate_json(row.body)
        for row in connection.execute(query.limit(limit))
    }


def delete(connection: sa.Connection, ids: Iterable[int]) -> None:
    """Delete letters whose content was drained."""
    connection.execute(sa.delete(DeadLetter).where(DeadLetter.id.in_(list(ids))))


def _of_no_library(connection: sa.Connection) -> int:
    query = sa.select(sa.func.count()).select_from(DeadLetter).where(DeadLetter.library == "")
    return connection.execute(query).scalar_one()
