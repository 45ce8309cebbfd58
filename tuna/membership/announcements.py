"""What coordinators announce in Redis to workers before their first chunk: namespaces, signing key, artifact store.

Keys, under `tuna:{<namespace>}:` but for the first:

    tuna:namespaces  set     the namespaces that coordinators work for: a worker that has had no chunk yet knows of no
                             database, so it shows itself to all
    signing          string  the key for artifacts, for workers that were not told it when they joined
    store            string  for the same, the URL of the artifacts; empty where Redis holds them
"""

from __future__ import annotations

from typing import cast

import redis

from tuna.errors import StoreAway
from tuna.settings import Settings

NAMESPACES_KEY = "tuna:namespaces"


def signing_key_name(namespace: str) -> str:
    """Where workers that did not join, and so may read all of Redis, find the key for artifacts."""
    return f"tuna:{{{namespace}}}:signing"


def signing_key(client: redis.Redis, settings: Settings, namespace: str) -> str:
    """The key (hex) with which this worker signs artifacts."""
    if settings.artifacts_key:
        return settings.artifacts_key.get_secret_value()
    found = client.get(signing_key_name(namespace))
    return found.decode() if isinstance(found, bytes) else ""


def store_name(namespace: str) -> str:
    """Where the same workers find where artifacts are."""
    return f"tuna:{{{namespace}}}:store"


def with_store(client: redis.Redis, settings: Settings, namespace: str) -> Settings:
    """The settings, with the coordinators' store of artifacts unless they name one or their owner was told all on joining.

    Raises StoreAway when no coordinator has told yet.
    """
    if settings.artifacts_url or settings.artifacts_key:
        return settings
    found = client.get(store_name(namespace))
    if not isinstance(found, bytes):
        raise StoreAway("No coordinator has told where the artifacts are.", hint="start one, of this version of Tuna")
    return settings.model_copy(update={"artifacts_url": found.decode() or None})


def namespaces(client: redis.Redis, settings: Settings) -> list[str]:
    """The databases that this process works for, as far as Redis tells."""
    if settings.namespace:
        return [settings.namespace]
    return sorted(name.decode() for name in cast(set[bytes], client.smembers(NAMESPACES_KEY)))
