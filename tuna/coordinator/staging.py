"""Staging: what claimed work items need and SQL keeps (config bodies, the code of rivals, the
history of searches and of those that they learn from) is copied to the artifact store, which may
have lost it."""

from __future__ import annotations

from collections.abc import Iterable

import sqlalchemy as sa
import structlog

from tuna.artifacts.store import Artifacts
from tuna.db import configs
from tuna.db.engine import reading, transaction
from tuna.errors import StorageFull, StoreUnavailable
from tuna.jobs import history, needed_artifacts
from tuna.libraries.items import WorkItem

log = structlog.get_logger(__name__)


def stage_artifacts(engine: sa.Engine, artifacts: Artifacts, items: Iterable[WorkItem]) -> int:
    """Put what `items` need, SQL has and the store lacks into the store; returns how many
    artifacts.

    For a coordinator, before it publishes items that it has claimed. Items without any cost
    nothing; each different one is checked, because a store may expire entries. Raises
    StoreUnavailable, on which a coordinator retries, also for a full store.
    """
    put = 0
    past: dict[str, int] = {}
    pairs: set[tuple[int, str]] = set()
    unkept: set[str] = set()
    for item in items:
        past |= dict.fromkeys(item.history, item.job_id)
        others = (sibling.artifact for sibling in item.siblings)
        names = (item.body, *item.history, *others, *(rival.artifact for rival in item.rivals))
        pairs |= {(item.job_id, name) for name in (*names, *item.data) if name}
        unkept |= set(item.data)
    if not pairs:
        return put
    transaction(engine, needed_artifacts.need, pairs)
    digests = sorted({digest for _, digest in pairs})
    artifacts.renew(digests)
    for digest in digests:
        if digest in unkept:  # SQL does not have it: if it is gone, the worker finds it lost
            continue
        try:
            artifacts.get(digest)
        except KeyError:
            with reading(engine) as connection:
                if digest in past:
                    blob = history.find_blocks(connection, {digest: past[digest]}).get(digest)
                else:
                    blob = configs.body(connection, digest)
            if blob is None:
                # a round was repeated since the claim: the worker finds the block lost, and its job
                # is claimed anew
                continue
            try:
                artifacts.put(blob)
            except StorageFull as error:
                raise StoreUnavailable(
                    f"No space is left for what work items need: {error}"
                ) from error
            put += 1
    if put:
        log.info("artifacts of SQL stored", count=put)
    return put
