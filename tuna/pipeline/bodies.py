"""Copies what work items need and SQL keeps to the artifact store, which may lose it: config bodies, the code of rivals."""

from __future__ import annotations

from collections.abc import Iterable

import sqlalchemy as sa
import structlog

from tuna.artifacts import Artifacts
from tuna.db import configs
from tuna.db.engine import reading, retrying, writing
from tuna.errors import StorageFull, StoreUnavailable
from tuna.libraries.items import WorkItem
from tuna.pipeline import needed_artifacts

log = structlog.get_logger(__name__)


def provide(engine: sa.Engine, artifacts: Artifacts, items: Iterable[WorkItem]) -> int:
    """Put those bodies and rivals' code that `items` need and the store lacks into the store; returns how many.

    For a coordinator, before it publishes items that it has claimed. Items without any cost nothing; each different
    one is checked, because a store may expire entries. Raises StoreUnavailable, on which a coordinator retries,
    also for a full store.
    """
    put = 0
    pairs = {(item.job_id, name) for item in items for name in (item.body, *(r.artifact for r in item.rivals)) if name}
    if not pairs:
        return put
    for attempt in retrying():
        with attempt, writing(engine) as connection:
            needed_artifacts.need(connection, pairs)
    digests = sorted({digest for _, digest in pairs})
    artifacts.renew(digests)
    for digest in digests:
        try:
            artifacts.get(digest)
        except KeyError:
            with reading(engine) as connection:
                blob = configs.body(connection, digest)
            try:
                artifacts.put(blob)
            except StorageFull as error:
                raise StoreUnavailable(
                    f"There is no space left for the bodies of configs or the code of rivals: {error}"
                ) from error
            put += 1
    if put:
        log.info("artifacts of SQL stored", count=put)
    return put
