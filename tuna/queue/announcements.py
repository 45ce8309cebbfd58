"""Announcements of coordinators to workers, in Redis: namespaces, keys of artifacts, artifact
store, open queues, orders.

Keys, under `tuna:{<namespace>}:` but for the first:

    tuna:namespaces  set     the namespaces of all coordinators: a worker that has had no chunk yet
                             does not know which database it serves, so it sends heartbeats to all
    signer           string  `Keys` of artifacts as JSON, the secret included
    store            string  the artifact store URL; empty if Redis holds the artifacts
    open:<queue>     string  there are jobs that have still to go through the queue, whether it is
                             empty or not; expires
    order:<worker>   string  `cordoned` (no new chunks) or `draining` (finish, then exit)
"""

from __future__ import annotations

from collections.abc import Collection, Iterable
from typing import cast

import redis

from tuna.artifacts.signatures import Keys
from tuna.errors import StoreUnavailable
from tuna.settings import Settings

NAMESPACES_KEY = "tuna:namespaces"
#: Seconds for which a queue is open after a coordinator announced it
OPEN_S = 10


def signer_key(namespace: str) -> str:
    """Redis key of the keys that sign artifacts."""
    return f"tuna:{{{namespace}}}:signer"


def artifact_keys(client: redis.Redis, settings: Settings, namespace: str) -> Keys | None:
    """The keys of artifacts of this worker; None before they are published.

    Raises StoreUnavailable if Redis does not answer, or what is published is not of this version.
    """
    if settings.artifacts_key:
        return Keys.of_secret(settings.artifacts_key.get_secret_value())
    try:
        found = client.get(signer_key(namespace))
        return Keys.from_json(found) if isinstance(found, bytes) else None
    except redis.RedisError as error:
        raise StoreUnavailable(
            f"Redis, which has the keys of artifacts, does not answer: {error}."
        ) from error
    except ValueError as error:
        hint = "run the same version of Tuna on all machines"
        raise StoreUnavailable(
            f"The published keys of artifacts cannot be read: {error}.", hint=hint
        ) from None


def announce_open(client: redis.Redis, namespace: str, queues: Iterable[str]) -> None:
    """Say that there are jobs which have still to go through these queues; expires after
    `OPEN_S`."""
    with client.pipeline(transaction=False) as pipe:
        for queue in queues:
            pipe.set(_open_key(namespace, queue), "", ex=OPEN_S)
        pipe.execute()


def is_open(client: redis.Redis, namespaces: Iterable[str], queues: Collection[str]) -> bool:
    """True if a coordinator of these has jobs that have still to go through one of the queues."""
    names = [_open_key(namespace, queue) for namespace in namespaces for queue in queues]
    return bool(names and client.exists(*names))


def _open_key(namespace: str, queue: str) -> str:
    return f"tuna:{{{namespace}}}:open:{queue}"


def control_key(namespace: str, worker: str) -> str:
    """Redis key of a worker's wanted state."""
    return f"tuna:{{{namespace}}}:order:{worker}"


def set_order(client: redis.Redis, namespace: str, worker: str, state: str) -> None:
    """Set a worker's wanted state: `cordoned`, `draining` or `active`."""
    if state == "active":
        client.delete(control_key(namespace, worker))
    else:
        client.set(control_key(namespace, worker), state)


def store_name(namespace: str) -> str:
    """Redis key of the artifact store URL."""
    return f"tuna:{{{namespace}}}:store"


def with_store(client: redis.Redis, settings: Settings, namespace: str) -> Settings:
    """The settings with the coordinators' artifact store, unless they name one.

    Raises StoreUnavailable if no coordinator has published its store yet.
    """
    if settings.artifacts_url or settings.artifacts_key:
        return settings
    found = client.get(store_name(namespace))
    if not isinstance(found, bytes):
        raise StoreUnavailable(
            "No coordinator has published its artifact store.",
            hint="start a coordinator of this version of Tuna",
        )
    return settings.model_copy(update={"artifacts_url": found.decode() or None})


def namespaces(client: redis.Redis) -> list[str]:
    """Namespaces of the databases whose coordinators use this Redis."""
    return sorted(name.decode() for name in cast(set[bytes], client.smembers(NAMESPACES_KEY)))
