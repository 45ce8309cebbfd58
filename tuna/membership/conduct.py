"""Counts what members write that no working member writes: cordons after some of it, revokes after
more.

tuna:{<namespace>}:faults  hash  member -> bad values so far, counted by all coordinators
"""

from __future__ import annotations

from collections.abc import Callable, Collection
from typing import Any, cast

import redis
import sqlalchemy as sa
import structlog

from tuna.db.engine import transaction
from tuna.membership import members as store
from tuna.services import redis_client

log = structlog.get_logger(__name__)

#: Bad values after which a member is cordoned, and after which it loses its access.
CORDON_AFTER, REVOKE_AFTER = 3, 6


class Conduct:
    """The bad values of one database's members."""

    def __init__(self, engine: sa.Engine, client: redis.Redis, namespace: str) -> None:
        self._engine = engine
        self._client = client
        self._key = f"tuna:{{{namespace}}}:faults"
        self._logged: set[tuple[str, str]] = set()
        self.changes = 0  #: of members' states so far

    def blame(self, worker: str, what: str) -> None:
        """Count one bad value of a member; `what` is said once in the log, and comes from this
        process, not from the member."""
        count = self._client.hincrby(self._key, worker, 1)
        if (worker, what) not in self._logged:
            self._logged.add((worker, what))
            log.warning("bad value of a member deleted", worker=worker, what=what, so_far=count)
        if count >= REVOKE_AFTER:
            self._set(worker, "revoked", _revoke)
        elif count >= CORDON_AFTER:
            self._set(worker, "cordoned", store.cordon)

    def forget(self, but: Collection[str]) -> None:
        """Forget all members but these."""
        there = (redis_client.text(name) for name in cast(list[Any], self._client.hkeys(self._key)))
        if gone := [name for name in there if name not in but]:
            self._client.hdel(self._key, *gone)
        self._logged = {pair for pair in self._logged if pair[0] in but}

    def _set(self, worker: str, state: str, change: Callable[[sa.Connection, str], bool]) -> None:
        if transaction(self._engine, change, worker):
            self.changes += 1
            log.warning(f"member {state} for what it wrote", worker=worker)


def _revoke(connection: sa.Connection, worker: str) -> bool:
    return store.set_state(connection, worker, "revoked")
