"""Revocation: takes from a former member, or from a spent token, all that it has in Redis.

SQL comes first, in one statement, and keeps what is still to be done (`cleared_at` is null): the
Redis user with its connections, the leases, the keys, the heartbeats. None of these steps reads
what a member wrote, each works when others fail, and any coordinator repeats them until they have
succeeded.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from datetime import timedelta
from typing import Any

import redis
import sqlalchemy as sa
import structlog

from tuna.db.engine import reading, transaction
from tuna.db.types import utc_now
from tuna.membership import members as store
from tuna.membership.access import Access
from tuna.membership.join import MAX_REQUEST_BYTES, answer_key, join_user, request_key
from tuna.queue import keys
from tuna.queue.heartbeat import HeartbeatBoard
from tuna.services import redis_client

log = structlog.get_logger(__name__)

#: For so long a coordinator that read the member's row before may still write keys for it; then it
#: is cleared a last time.
_LAST_WRITE_S = 10.0
#: Former members and tokens that are cleared at a time.
_BATCH = 50
#: Expiry of an `Answer`.
ANSWER_TTL_S = 60
#: Between the use of a token in SQL and its answer in Redis.
ANSWER_GRACE_S = 5.0


@dataclass(frozen=True)
class Failure:
    """A step that has to be repeated."""

    what: str  #: remains, in words
    error: Exception


class Revocation:
    """Clears Redis of the former members and spent tokens of one database."""

    def __init__(
        self,
        engine: sa.Engine,
        client: redis.Redis,
        namespace: str,
        access: Access,
        board: HeartbeatBoard,
        evict: Callable[[str], list[str]],
    ) -> None:
        """`evict` revokes a worker's leases and returns its chunks (`Leases.evict`)."""
        self._engine = engine
        self._client = client
        self._namespace = namespace
        self._access = access
        self._board = board
        self._evict = evict
        self._logged: set[tuple[str, str]] = set()

    def clear_all(self) -> None:
        """Clear all of whom SQL says that they are not yet cleared, in batches; raises redis' error
        in an outage."""
        now = utc_now()
        with reading(self._engine) as connection:
            former = store.uncleared_members(connection, _BATCH)
            spent = store.spent_tokens(connection, _BATCH)
        before = now - timedelta(seconds=_LAST_WRITE_S)
        workers = [
            one.name
            for one in former
            if self._is_clear(self.clear(one.name)) and one.revoked_at < before
        ]
        tokens = [
            one.id
            for one in spent
            if not self._is_awaited(one) and self._is_clear(self.clear_token(one.id))
        ]
        if workers or tokens:
            transaction(self._engine, store.set_cleared, workers, tokens)

    def clear(self, worker: str) -> list[Failure]:
        """Take all that a former member has; returns what failed."""
        return self._take(
            worker,
            {
                "its Redis user": lambda: self._end_access(worker),
                "its leases": lambda: self._evict(worker),
                "its keys": lambda: self._unlink(
                    *keys.all_keys(self._namespace, worker),
                    *keys.former_keys(self._namespace, worker),
                ),
                "its heartbeats": lambda: self._board.remove_worker(worker),
            },
        )

    def clear_token(self, token_id: str) -> list[Failure]:
        """Take all that a spent token has; returns what failed."""
        names = request_key(self._namespace, token_id), answer_key(self._namespace, token_id)
        return self._take(
            token_id,
            {
                "its Redis user": lambda: self._access.remove(join_user(self._namespace, token_id)),
                "its request and answer": lambda: self._unlink(*names),
            },
        )

    def _take(self, whose: str, steps: dict[str, Callable[[], object]]) -> list[Failure]:
        failed = []
        for what, step in steps.items():
            try:
                step()
            except (
                redis.RedisError,
                ValueError,
            ) as error:  # ValueError: a name in Redis that is no UTF-8
                failed.append(Failure(what, error))
                if (whose, what) not in self._logged:
                    self._logged.add((whose, what))
                    log.warning(
                        "revocation incomplete", whose=whose, remains=what, error=str(error)
                    )
        return failed

    def _is_clear(self, failures: Sequence[Failure]) -> bool:
        for failure in failures:
            if redis_client.is_outage(failure.error):
                raise failure.error  # all others would wait for as long
        return not failures

    def _is_awaited(self, token: Any) -> bool:
        """True while the worker that used the token may still fetch its answer, or another
        coordinator may yet write it."""
        if token.used_at is None or token.revoked_at is not None:
            return False
        since = (utc_now() - token.used_at).total_seconds()
        lengths = [
            self._client.strlen(name(self._namespace, token.id))
            for name in (request_key, answer_key)
        ]
        if max(lengths) > MAX_REQUEST_BYTES:  # its user fills Redis
            return False
        return since < ANSWER_GRACE_S or (since < ANSWER_TTL_S and lengths[1] > 0)

    def _end_access(self, worker: str) -> None:
        if self._access.remove(self._access.user(worker)):
            log.warning("worker revoked", worker=worker)

    def _unlink(self, *names: str) -> None:
        self._client.unlink(*names)  # freed in the background: a member's keys may be large
