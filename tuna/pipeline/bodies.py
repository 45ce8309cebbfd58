"""Bodies of configs, on their way to workers: from SQL, where they stay, into the artifact store, where they may be lost."""

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
    """Put the bodies that `items` need into the store, those that are not there; returns how many.

    For a coordinator, before it publishes items that it has claimed. Items without a body cost nothing; each different
    body is looked at, because a store may forget. Raises StoreUnavailable, for which a coordinator waits, also for a full store.
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
                raise StoreUnavailable(f"There is no room for the bodies of configs: {error}") from error
            put += 1
    if put:
        log.info("bodies of configs were put into the artifact store", count=put)
    return put
