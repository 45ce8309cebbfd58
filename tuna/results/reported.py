"""Reported times in SQL: what programs measured by themselves and Tuna did not.

They lie in a table of their own and are never joined with results, so no golden version, report or
export of results counts one; `tuna query --reported` shows them.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from datetime import datetime

import sqlalchemy as sa

from tuna.db.bulk import upsert, values_among
from tuna.db.types import utc_now
from tuna.errors import BadInput, NotFound
from tuna.libraries.results import NO_TIME, ReportedTime, is_time
from tuna.results.core_tables import reported

__all__ = ["SOURCES", "Recorded", "ReportedTime", "find", "of_release", "record"]

#: Names of the formats of reports
SOURCES = ("triton", "tunableop", "hipblaslt", "flashinfer", "vllm-ssu")
_MAX_CHARS = {"device": 128, "who": 255, "origin": 255}
_NAMES = (
    *("source", "subject", "implementation", "time_ms", "who", "origin", "device", "versions"),
    *("config_key", "reported_at"),
)
_COLUMNS = [reported.c[name] for name in _NAMES]


@dataclass(frozen=True)
class Recorded:
    """Numbers of reports that were stored."""

    new: int
    replaced: int  #: number of entries that had been reported before, with this or another time


def record(connection: sa.Connection, rows: Iterable[ReportedTime]) -> Recorded:
    """Store reports; of those with one digest the last counts.

    Raises BadInput before anything is stored if a source is unknown, a time none that a run can
    take, or a name too long.
    """
    from tuna.db.models import Reported  # a query starts without the models

    now = utc_now()
    found = {}
    for row in rows:
        _check(row)
        values = {**vars(row), "versions": dict(row.versions or {}), "reported_at": now}
        found[row.digest] = {"digest": row.digest, **values}
    query = sa.select(Reported.digest)
    there = values_among(connection, query, Reported.digest, found)
    upsert(connection, Reported, list(found.values()), key=("digest",), replace=True)
    return Recorded(len(found) - len(there), len(there))


def _check(row: ReportedTime) -> None:
    if row.source not in SOURCES:
        raise BadInput(f"Unknown source of reports {row.source!r}.", hint=", ".join(SOURCES))
    if row.time_ms is not None and not is_time(row.time_ms):
        raise BadInput(f"A report cannot be stored: {NO_TIME}.")
    for name, most in _MAX_CHARS.items():
        if len(getattr(row, name)) > most:
            raise BadInput(f"The {name} of a report has at most {most} characters.")


def find(
    connection: sa.Connection,
    limit: int,
    *,
    layer: str | None = None,
    arch: str | None = None,
    since: datetime | None = None,
) -> list[ReportedTime]:
    """Return reports by source and subject, the fastest first.

    `layer` is text of the subject, or a line that names the layer. `arch` is what the device
    is, or how it begins before a colon.
    """
    query = sa.select(*_COLUMNS).limit(limit)
    if layer is not None:
        named = reported.c.subject.contains(layer, autoescape=True)
        key = _key(layer)
        query = query.where(named if key is None else sa.or_(named, reported.c.config_key == key))
    if arch is not None:
        query = query.where(_on(arch))
    if since is not None:
        query = query.where(reported.c.reported_at >= since)
    query = query.order_by(
        reported.c.source,
        reported.c.subject,
        reported.c.time_ms.is_(None),
        reported.c.time_ms,
        reported.c.id,
    )
    return [ReportedTime(*row) for row in connection.execute(query)]


def _key(layer: str) -> str | None:
    from tuna.configs import read_one  # few commands need it

    try:
        return read_one(layer).key
    except BadInput:
        return None


def _on(arch: str) -> sa.ColumnElement[bool]:
    column = reported.c.device
    return sa.or_(column == arch, column.startswith(f"{arch}:", autoescape=True))


def of_release(
    connection: sa.Connection, source: str, arch: str | None, release: str | None
) -> tuple[list[ReportedTime], Counter[str]]:
    """Return the fastest report of each subject for one device and release, and counts of others.

    It is the release that was reported last, of those on `arch` with a version that contains the
    text `release`. Raises NotFound.
    """
    query = sa.select(*_COLUMNS).where(reported.c.source == source).order_by(reported.c.id)
    rows = [ReportedTime(*row) for row in connection.execute(query)]
    asked = [row for row in rows if _is_of(row, arch, release)]
    if not asked:
        releases = sorted({f"{row.device or 'unknown'}: {_words(row.versions)}" for row in rows})
        raise NotFound(
            f"No {source} times of that device and release were reported.",
            hint=f"there are: {'; '.join(releases[:5]) or 'none; see `tuna import-db`'}",
        )
    latest = asked[-1]
    best: dict[str, ReportedTime] = {}
    others: Counter[str] = Counter()
    for row in rows:
        if (row.device, row.versions) != (latest.device, latest.versions):
            others[f"of another device or release than {_words(latest.versions)}"] += 1
        elif row.time_ms is None:
            others["it failed"] += 1
        else:
            slower = sorted(filter(None, [best.get(row.subject), row]), key=_time)
            best[row.subject] = slower[0]
            others["slower than another of its layer"] += len(slower) - 1
    return [best[subject] for subject in sorted(best)], +others


def _is_of(row: ReportedTime, arch: str | None, release: str | None) -> bool:
    named = arch is None or arch in (row.device, row.device.partition(":")[0])
    versions = (row.versions or {}).values()
    return named and (release is None or any(release in version for version in versions))


def _words(versions: Mapping[str, str] | None) -> str:
    return ", ".join(f"{name} {text}" for name, text in sorted((versions or {}).items()))


def _time(row: ReportedTime) -> float:
    return row.time_ms or 0.0
