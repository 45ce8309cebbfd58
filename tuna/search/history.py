"""The history of a search for its next round: a block of trials for each earlier one, as artifacts,
since workers have no SQL.

A block is gzip of one JSON object a line, in the order of the candidates: `params`, `time_ms`
(null: it failed) and `cause`. The round just before the one that is proposed may still be measured,
so its block has params alone, whether it is or not: what is proposed depends on results, never on
when they arrived.
"""

from __future__ import annotations

import gzip
import hashlib
import json
from collections import defaultdict
from collections.abc import Mapping, Sequence
from typing import Any

import sqlalchemy as sa

from tuna.db.bulk import parts
from tuna.db.models import Job, TrialRow
from tuna.files import gunzip
from tuna.libraries.results import is_time


def blocks(connection: sa.Connection, search_id: int, before: int) -> list[bytes]:
    """The blocks of the rounds of a search `before` this one, the first round first."""
    query = (
        sa.select(Job.round, TrialRow.params, TrialRow.time_ms, TrialRow.cause)
        .join(TrialRow, TrialRow.job_id == Job.id)
        .where(Job.search_id == search_id, Job.round < before, TrialRow.params.is_not(None))
        .order_by(Job.round, TrialRow.number)
    )
    trials: dict[int, list[Any]] = defaultdict(list)
    for row in connection.execute(query):
        trials[row.round].append(row)
    return [block(trials[number], measured=number < before - 1) for number in range(before)]


def find(connection: sa.Connection, digests: Mapping[str, int]) -> dict[str, bytes]:
    """Blocks by their SHA-256, of the searches of the jobs whose ids are given; what changed
    meanwhile is left out."""
    found: dict[str, bytes] = {}
    for part in parts(sorted(set(digests.values()))):
        query = sa.select(Job.search_id, Job.round).where(Job.id.in_(part))
        for search_id, before in connection.execute(query):
            if search_id is not None:
                found |= {digest(one): one for one in blocks(connection, search_id, before)}
    return {name: found[name] for name in digests if name in found}


def digest(block: bytes) -> str:
    """The name of a block in the artifact store."""
    return hashlib.sha256(block).hexdigest()


def block(trials: Sequence[Any], *, measured: bool) -> bytes:
    """Rows of `trial` with `params`, and with `time_ms` and `cause` if they are `measured`."""
    lines = (
        json.dumps(
            {
                "params": row.params,
                **({"time_ms": _time_ms(row), "cause": row.cause} if measured else {}),
            },
            separators=(",", ":"),
        )
        for row in trials
    )
    return gzip.compress("\n".join(lines).encode(), mtime=0)


def _time_ms(row: Any) -> float | None:
    """The time of a row of `trial`; None for one that an older version took in and that no run can
    have taken."""
    time_ms: float | None = row.time_ms
    return time_ms if is_time(time_ms) else None


def read(blocks: Sequence[bytes]) -> list[list[dict[str, Any]]]:
    """The trials of blocks."""
    return [[json.loads(line) for line in gunzip(block).splitlines()] for block in blocks]
