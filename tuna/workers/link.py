"""The connection of a worker process to its coordinators: Redis for own workers, a gateway for
remote ones."""

from __future__ import annotations

import contextvars
import functools
import threading
from typing import Protocol

import redis
import stamina
import structlog
from pydantic import BaseModel, ConfigDict

from tuna.artifacts.store import Artifacts
from tuna.errors import StoreUnavailable
from tuna.libraries.context import ArtifactStore
from tuna.queue.announcements import artifact_keys, namespaces, with_store
from tuna.queue.connection import connect
from tuna.queue.heartbeat import Board, HeartbeatBoard, WorkerStatus
from tuna.queue.leases import Leases, WorkerLease, new_id
from tuna.queue.messages import Chunk
from tuna.services import redis_client
from tuna.settings import Settings, get_settings
from tuna.vocabulary import OUTAGE_S

log = structlog.get_logger(__name__)

#: Seconds within which a canceled chunk, or a revoked worker, is noticed; the sandbox then kills
#: the child within half a second
_RENEW_S = 1.0
_through_outages = stamina.retry(
    on=redis_client.is_passing, attempts=None, timeout=OUTAGE_S, wait_max=2.0
)


class Elsewhere(BaseModel):
    """Live workers at other places that take from a chunk's queue."""

    model_config = ConfigDict(extra="forbid", frozen=True)
    others: bool = False  #: true if other workers take work at the moment
    succeeds: bool | None = None  #: true if they succeed with what fails here; None: not known


class WorkerLink(Board, Protocol):
    """Requests of a worker process to its coordinators, and where it publishes its status."""

    def store(self, chunk: Chunk) -> ArtifactStore:
        """The artifacts of a chunk; raises StoreUnavailable."""

    def lease(self, chunk: Chunk, worker: str) -> WorkerLease:
        """The lease of a chunk that this process, named `worker`, was sent."""

    def elsewhere(self, chunk: Chunk, place: str) -> Elsewhere:
        """Live workers at other places than `place` that could run the chunk."""


class Renewals:
    """Renews a lease from a background thread until it is lost or the chunk is done."""

    def __init__(self, lease: WorkerLease) -> None:
        self.lost = False
        self._lease = lease
        self._stop = threading.Event()
        context = contextvars.copy_context()  # the fields of log lines
        self._thread = threading.Thread(
            target=context.run, args=(self._beat,), name="renewals", daemon=True
        )

    def __enter__(self) -> Renewals:
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._stop.set()
        self._thread.join()

    def _beat(self) -> None:
        while not self._stop.wait(_RENEW_S):
            self.lost = self.lost or not self._lease.renew()


class RecordedStore:
    """A store of artifacts that records the digests of what is put into it."""

    def __init__(self, store: ArtifactStore) -> None:
        self.digests: set[str] = set()
        self.get, self.find_build, self.record_build = (
            store.get,
            store.find_build,
            store.record_build,
        )
        self._store = store

    def put(self, data: bytes) -> str:
        """Store `data`; returns its SHA-256. Raises what the store does."""
        digest = self._store.put(data)
        self.digests.add(digest)
        return digest


class RedisLease:
    """The lease of one chunk in Redis; an outage is waited for."""

    def __init__(self, leases: Leases, chunk: str, token: str) -> None:
        self._leases = leases
        self._chunk = chunk
        self._token = token

    @_through_outages
    def take(self, entry: str) -> bool:
        """Acquire the lease, appending `entry` to the results."""
        return self._leases.take(self._chunk, self._token, entry)

    def renew(self) -> bool:
        """Heartbeat; False if the lease is lost."""
        try:
            return self._leases.renew(self._chunk, self._token)
        except redis.RedisError as error:
            log.warning("heartbeat failed", error=str(error))
            return True

    @_through_outages
    def report(self, entry: str) -> bool:
        """Append `entry`, if still the holder."""
        return self._leases.report(self._chunk, self._token, entry)

    @_through_outages
    def finish(self, entry: str) -> bool:
        """Append the last `entry` and release the lease."""
        return self._leases.finish(self._chunk, self._token, entry)

    def abandon(self, entry: str) -> None:
        """Append `entry`, unless Redis does not answer."""
        try:
            self._leases.abandon(entry)
        except redis.RedisError as error:
            log.warning("abandoned artifacts not reported", error=str(error))

    def close(self) -> None:
        """Leave it to expire, unless it was released."""


class RedisLink:
    """The connection of an own worker."""

    def __init__(
        self, client: redis.Redis, lease_s: float, settings: Settings | None = None
    ) -> None:
        """`settings`: of the artifact store, by default those of this process."""
        self._client = client
        self._lease_s = lease_s
        self._settings = settings
        self._stores: dict[tuple[str, str | None], Artifacts] = {}

    @classmethod
    def from_settings(cls, settings: Settings) -> RedisLink:
        """Connect; raises ServiceError."""
        return cls(connect(settings), settings.lease_s, settings)

    def announce(self, status: WorkerStatus) -> None:
        """Publish `status` for each database, since the next chunk may be of any."""
        for name in namespaces(self._client):
            self._board(name).announce(status)

    def remove(self, name: str) -> None:
        """Remove the status of worker `name`."""
        for namespace in namespaces(self._client):
            self._board(namespace).remove(name)

    def store(self, chunk: Chunk) -> Artifacts:
        """The coordinators' store, with the newest keys."""
        own = self._settings or get_settings()
        settings = with_store(self._client, own, chunk.namespace)
        key = chunk.namespace, settings.artifacts_url
        if key not in self._stores:
            newest = functools.partial(artifact_keys, self._client, own, chunk.namespace)
            self._stores[key] = Artifacts.from_settings(
                settings, chunk.namespace, newest=newest, cached=True
            )
        store = self._stores[key]
        store.refresh()  # the keys may have been rotated since the last chunk
        if store.keys is None:  # Redis was wiped: others refuse artifacts without a signature
            raise StoreUnavailable(
                "No coordinator has published the keys of artifacts.", hint="it does so each second"
            )
        store.check()
        return store

    def lease(self, chunk: Chunk, worker: str) -> RedisLease:
        """The lease of a chunk that came through the broker."""
        leases = Leases(self._client, chunk.namespace, self._lease_s)
        return RedisLease(leases, chunk.id, f"{worker}/{new_id()}")

    def elsewhere(self, chunk: Chunk, place: str) -> Elsewhere:
        """Live workers, as far as their heartbeats tell."""
        try:
            return elsewhere(self._board(chunk.namespace), chunk, place)
        except redis.RedisError as error:
            log.debug("heartbeats unreadable", error=str(error))
            return Elsewhere()

    def _board(self, namespace: str) -> HeartbeatBoard:
        return HeartbeatBoard(self._client, namespace, self._lease_s)


def elsewhere(board: HeartbeatBoard, chunk: Chunk, place: str) -> Elsewhere:
    """Live workers at other places than `place` that could run the chunk, by a board."""
    others = [one for one in board.live() if one.place != place and not one.aside]
    if chunk.environment:
        others = [one for one in others if chunk.environment in one.environment.split(", ")]
    else:
        others = [one for one in others if chunk.toolchain in one.toolchains]
    succeeds: bool | None = None
    if any(one.done and not one.failing for one in others):
        succeeds = True
    elif all(one.failing for one in others):
        succeeds = False
    return Elsewhere(others=bool(others), succeeds=succeeds)
