"""Dead letters: reports that were taken from the stream and could not be drained, in SQL with their
bytes and the reason.

There are two kinds. A report about a session whose library is not installed here waits for a
coordinator that has it. A report that is malformed, or that the database refused, is kept for a
person to look at.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass

import sqlalchemy as sa
import structlog
from pydantic import ValidationError

from tuna.db.models import DeadLetter
from tuna.db.types import utc_now
from tuna.drain.find_db_writer import fits
from tuna.libraries.registry import find_library
from tuna.queue.messages import Report
from tuna.queue.results import validation_words

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


def for_installed_libraries(
    connection: sa.Connection, limit: int
) -> tuple[dict[int, Report], dict[int, str]]:
    """Return up to `limit` reports, by their letter's id, that waited for a library which is
    installed here, and why others cannot be read: they may be of another version of Tuna."""
    names = connection.execute(
        sa.select(DeadLetter.library).where(DeadLetter.library != "").distinct()
    ).scalars()
    here = [name for name in names if find_library(name) is not None]
    if not here:
        return {}, {}
    query = (
        sa.select(DeadLetter.id, DeadLetter.body)
        .where(DeadLetter.library.in_(here))
        .order_by(DeadLetter.id)
    )
    reports: dict[int, Report] = {}
    faults: dict[int, str] = {}
    for row in connection.execute(query.limit(limit)):
        try:
            reports[row.id] = Report.model_validate_json(row.body)
        except ValidationError as error:
            faults[row.id] = validation_words(error)
    return reports, faults


def settle(connection: sa.Connection, drained: Iterable[int], faults: Mapping[int, str]) -> None:
    """Delete letters whose content was drained; those that cannot be read are for a person from now
    on, and their jobs are repeated."""
    connection.execute(sa.delete(DeadLetter).where(DeadLetter.id.in_(list(drained))))
    for letter_id, fault in faults.items():
        log.error("dead letter cannot be read", letter=letter_id, fault=fault)
        values = {"library": "", "fault": fault}
        connection.execute(sa.update(DeadLetter).where(DeadLetter.id == letter_id).values(values))


def _of_no_library(connection: sa.Connection) -> int:
    query = sa.select(sa.func.count()).select_from(DeadLetter).where(DeadLetter.library == "")
    return connection.execute(query).scalar_one()
