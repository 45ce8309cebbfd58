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
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import sqlalchemy as sa

from tuna.db.batches import parts
from tuna.db.models import Job, Trial
from tuna.files import gunzip
from tuna.jobs.rows import ClaimRow
from tuna.libraries.results import is_time


def blocks(
    connection: sa.Connection, session_id: int, rows: Iterable[ClaimRow]
) -> dict[int, list[bytes]]:
    """By job: the blocks of the rounds before its own, the first round first."""
    found: dict[int, list[bytes]] = {}
    for row in rows:
        if row.round:
            trials = _trials(connection, _of_search(session_id, row))
            found[row.id] = [
                block(trials[number], measured=number < row.round - 1)
                for number in range(row.round)
            ]
    return found


def find(connection: sa.Connection, digests: Mapping[str, int]) -> dict[str, bytes]:
    """Blocks by their SHA-256, of the searches of the jobs whose ids are given; what changed
    meanwhile is left out."""
    found: dict[str, bytes] = {}
    columns = (Job.id, Job.session_id, Job.config_id, Job.solver_id, Job.steps, Job.round)
    for part in parts(sorted(set(digests.values()))):
        for row in connection.execute(sa.select(*columns).where(Job.id.in_(part))):
            for made in blocks(connection, row.session_id, [row]).values():
                found |= {digest(block): block for block in made}
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


def _of_search(session_id: int, row: ClaimRow) -> list[Any]:
    """The earlier rounds of the search that a job is a round of. Unique key of `job`: a range."""
    same = (Job.config_id == row.config_id, Job.solver_id == row.solver_id, Job.steps == row.steps)
    return [Job.session_id == session_id, *same, Job.round < row.round]


def _trials(connection: sa.Connection, rounds: Sequence[Any]) -> dict[int, list[Any]]:
    query = (
        sa.select(Job.round, Trial.params, Trial.time_ms, Trial.cause)
        .join(Trial, Trial.job_id == Job.id)
        .where(*rounds, Trial.params.is_not(None))
        .order_by(Job.round, Trial.number)
    )
    found: dict[int, list[Any]] = defaultdict(list)
    for row in connection.execute(query):
        found[row.round].append(row)
    return found
