"""Chunks that are claimed by hand, and reports about them."""

from __future__ import annotations

import sqlalchemy as sa

from tuna.db.engine import writing
from tuna.jobs.failures import release
from tuna.libraries.registry import get_library
from tuna.queue.claim import ClaimedChunk

LIBRARY = get_library("noop")
MAX = 3


def release_chunks(engine: sa.Engine, chunks: list[ClaimedChunk], *, worker_lost: bool) -> int:
    with writing(engine) as connection:
        ids = [chunk.id for chunk in chunks]
        return release(connection, ids, max_attempts=MAX, worker_lost=worker_lost)
