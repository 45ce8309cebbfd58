"""Who works now: each worker process says so every few seconds, and what it does not repeat is forgotten.

Keys, all under `tuna:{<namespace>}:`

    worker:<name>  string  a `Presence` as JSON; expires when its worker goes silent
    workers        set     names that have announced themselves, so that nobody needs to scan for keys
    signing        string  the key for artifacts, for workers that were not told it when they joined
    store          string  for the same, the URL of the artifacts; empty where Redis holds them

and beside them `tuna:namespaces`, a set of the namespaces that enqueuers work for: a worker that has had no chunk yet
knows of no database, so it shows itself to all.
"""

from __future__ import annotations

import dataclasses
import json
import threading
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, cast

import redis
import structlog

from tuna import redis_client
from tuna.errors import StoreAway
from tuna.settings import Settings

log = structlog.get_logger(__name__)

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
    """The settings, with the enqueuers' store of artifacts unless they name one or their owner was told all on joining.

    Raises StoreAway when no enqueuer has told yet.
    """
    if settings.artifacts_url or settings.artifacts_key:
        return settings
    found = client.get(store_name(namespace))
    if not isinstance(found, bytes):
        raise StoreAway("No enqueuer has told where the artifacts are.", hint="start one, of this version of Tuna")
    return settings.model_copy(update={"artifacts_url": found.decode() or None})


#: A change of what is in hand is told at most this often.
_CALM_S = 0.5


@dataclass(frozen=True)
class Presence:
    """A worker process as it described itself last."""

    name: str
    role: str  #: compile or eval
    host: str
    pid: int
    device: str
    environment: str  #: keys of the environments that it measures for; empty for compile workers
    toolchains: tuple[str, ...]
    job_ids: tuple[int, ...]  #: in hand now
    started_at: float  #: seconds since the epoch, worker's clock
    seen_at: float  #: the same, of the latest announcement
    done: int = 0  #: items finished since the start

    def to_json(self) -> str:
        """The JSON form that travels."""
        return json.dumps(dataclasses.asdict(self))

    @classmethod
    def from_json(cls, text: str | bytes) -> Presence:
        """What `to_json` made; raises ValueError for anything else."""
        try:
            fields = json.loads(text)
            known = {field.name: fields[field.name] for field in dataclasses.fields(cls)}
            return cls(**{**known, "toolchains": tuple(known["toolchains"]), "job_ids": tuple(known["job_ids"])})
        except (TypeError, KeyError) as error:
            raise ValueError(f"not a presence: {error}") from None


class PresenceBoard:
    """The workers of one database's work."""

    def __init__(self, client: redis.Redis, namespace: str, ttl_s: float) -> None:
        self._client = client
        self._ttl_ms = int(ttl_s * 1000)
        self._prefix = f"tuna:{{{namespace}}}:worker:"
        self._names_key = f"tuna:{{{namespace}}}:workers"

    def announce(self, presence: Presence) -> None:
        """Show `presence` until `ttl_s` is over or it announces itself again."""
        with self._client.pipeline(transaction=False) as pipe:
            pipe.set(self._prefix + presence.name, presence.to_json(), px=self._ttl_ms)
            pipe.sadd(self._names_key, presence.name)
            pipe.execute()

    def remove(self, name: str) -> None:
        """Forget the worker `name` at once."""
        with self._client.pipeline(transaction=False) as pipe:
            pipe.delete(self._prefix + name)
            pipe.srem(self._names_key, name)
            pipe.execute()

    def live(self) -> list[Presence]:
        """Every worker that has announced itself within `ttl_s`, by name; what is not a presence is left out."""
        names = sorted(redis_client.text(name) for name in cast(set[Any], self._client.smembers(self._names_key)))
        if not names:
            return []
        texts = cast(list[Any], self._client.mget([self._prefix + name for name in names]))
        # One that announces itself just now comes back with its next announcement.
        gone = [name for name, text in zip(names, texts, strict=True) if text is None]
        if gone:
            self._client.srem(self._names_key, *gone)
        return [found for name, text in zip(names, texts, strict=True) if text and (found := _read(name, text))]


class Announcer:
    """Keeps the presence of this process up to date from a thread of its own; what Redis refuses is only logged."""

    def __init__(self, boards: Callable[[], Sequence[PresenceBoard]], presence: Presence, every_s: float) -> None:
        """`boards`: asked at every beat, since databases come and go."""
        self._boards = boards
        self._presence = presence
        self._every_s = every_s
        self._changed = threading.Event()
        self._stopped = threading.Event()
        self._thread = threading.Thread(target=self._beat, name="presence", daemon=True)

    def start(self) -> Announcer:
        """Announce from now on."""
        self._thread.start()
        return self

    def stop(self) -> None:
        """Take the presence off the boards."""
        self._stopped.set()
        self._changed.set()
        self._thread.join()
        self._each(lambda board: board.remove(self._presence.name))

    def begin(self, job_ids: Sequence[int]) -> None:
        """These jobs are in hand now."""
        self._presence = dataclasses.replace(self._presence, job_ids=tuple(job_ids))
        self._changed.set()

    def end(self, done: int) -> None:
        """Nothing is in hand any more; `done` items were finished."""
        self._presence = dataclasses.replace(self._presence, job_ids=(), done=self._presence.done + done)
        self._changed.set()

    def _beat(self) -> None:
        while not self._stopped.is_set():
            self._changed.clear()
            presence = dataclasses.replace(self._presence, seen_at=time.time())
            self._each(lambda board, shown=presence: board.announce(shown))  # type: ignore[misc]
            self._stopped.wait(_CALM_S)
            self._changed.wait(max(0.0, self._every_s - _CALM_S))

    def _each(self, call: Callable[[PresenceBoard], None]) -> None:
        try:
            for board in self._boards():
                call(board)
        except redis.RedisError as error:
            log.debug("Redis did not take a presence", error=str(error))


def _read(name: str, text: bytes | str) -> Presence | None:
    try:
        found = Presence.from_json(text)
    except ValueError:
        return None
    return found if found.name == name else None
