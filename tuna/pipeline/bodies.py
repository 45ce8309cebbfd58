"""Copies config bodies from SQL, which keeps them, to the artifact store, which may lose them, for workers to read."""

from __future__ import annotations

from collections.abc import Iterable

import sqlalchemy as sa
import structlog

from tuna.artifacts import Artifacts
from tuna.db import configs
from tuna.db.engine import reading
from tuna.errors import StorageFull, StoreUnavailable
from tuna.libraries.items import WorkItem

log = structlog.get_logger(__name__)


def provide(engine: sa.Engine, artifacts: Artifacts, items: Iterable[WorkItem]) -> int:
    """Put those bodies that `items` need and the store lacks into the store; returns how many.

    For a coordinator, before it publishes items that it has claimed. Items without a body cost nothing; each different
    body is checked, because a store may expire entries. Raises StoreUnavailable, on which a coordinator retries,
    also for a full store.
    """
    put = 0
    for digest in sorted({item.body for item in items if item.body}):
        try:
            artifacts.get(digest)
        except KeyError:
            with reading(engine) as connection:
                blob = configs.body(connection, digest)
            try:
                artifacts.put(blob)
            except StorageFull as error:
                raise StoreUnavailable(f"There is no space left for the bodies of configs: {error}") from error
            put += 1
    if put:
        log.info("config bodies stored", count=put)
    return put
