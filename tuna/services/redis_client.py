"""Redis clients: retry policies, errors, decoding, and the versions of safe servers."""

from __future__ import annotations

import contextlib
import re
from collections.abc import Iterator, Mapping
from typing import Any

import redis
import structlog
from redis.backoff import ExponentialBackoff, NoBackoff
from redis.retry import Retry

log = structlog.get_logger(__name__)

Version = tuple[int, ...]
#: First versions of each branch without the holes in scripts that run foreign code, as of May 2026:
#: CVE-2025-49844, and where later releases fix them, CVE-2026-23631 and CVE-2026-23479. From the
#: projects' release notes.
_REDIS = ((6, 2, 20), (7, 2, 11), (7, 4, 9), (8, 0, 4), (8, 2, 6), (8, 4, 3), (8, 6, 3))
_VALKEY = ((7, 2, 13), (8, 0, 8), (8, 1, 7), (9, 0, 4))


#: Seconds that a client waits for an answer; all that Tuna asks for takes moments.
ANSWER_S = 8.0
#: Seconds that a client waits for a connection
CONNECT_S = 5.0


def retrying_client(url: str) -> redis.Redis:
    """Make a client that retries for a few seconds where Redis refuses or closes connections;
    raises ValueError for an unusable URL.

    A command that is not answered within `ANSWER_S` raises TimeoutError and is not sent again: a
    server that was stopped does both once it goes on.
    """
    retry = Retry(
        ExponentialBackoff(cap=1.0, base=0.05), 4, supported_errors=(redis.ConnectionError,)
    )
    client: redis.Redis = redis.Redis.from_url(
        url, socket_connect_timeout=CONNECT_S, socket_timeout=ANSWER_S, retry=retry
    )
    return client


def single_attempt_client(url: str, wait_s: float) -> redis.Redis:
    """Make a client without retries; raises ValueError for an unusable URL.

    `wait_s` limits connecting and reading.
    """
    client: redis.Redis = redis.Redis.from_url(
        url, socket_connect_timeout=wait_s, socket_timeout=wait_s, retry=Retry(NoBackoff(), 0)
    )
    return client


def is_full(error: BaseException) -> bool:
    """True if Redis refused a command because maxmemory is reached.

    The class of the error differs between scripts and versions.
    """
    return isinstance(error, redis.ResponseError) and "maxmemory" in str(error)


#: Errors of a Redis that cannot take writes now: during a failover, without its replicas, while it
#: cannot save, loads its data, or runs a long script. Within a script the code follows other words.
_UNABLE = re.compile(
    r"\b(READONLY|NOREPLICAS|MISCONF|MASTERDOWN|CLUSTERDOWN|TRYAGAIN|LOADING|BUSY)\b|read only"
    r" replica"
)
#: Classes of these errors in redis-py, which removes the code from the message
_UNABLE_CLASSES = (
    redis.exceptions.NoScriptError,
    redis.exceptions.ReadOnlyError,
    redis.exceptions.ClusterDownError,  # MASTERDOWN too
    redis.exceptions.TryAgainError,
)


def is_outage(error: BaseException) -> bool:
    """True if Redis is unreachable or read-only for a while: the command may succeed later.

    Coordinators, workers and the artifact store decide by this function alone. Not after an
    authentication error: a password that was refused will be refused again. A script may be missing
    in a pipeline if Redis was restarted after it was loaded.
    """
    if isinstance(error, _UNABLE_CLASSES):
        return True
    if isinstance(error, redis.ResponseError):
        return (
            not isinstance(error, redis.exceptions.NoPermissionError)
            and _UNABLE.search(str(error)) is not None
        )
    away = isinstance(error, redis.ConnectionError | redis.TimeoutError)
    return away and not isinstance(
        error, redis.AuthenticationError | redis.exceptions.AuthorizationError
    )


def is_passing(error: BaseException) -> bool:
    """True if the command may succeed later: an outage, or Redis is full until it is drained."""
    return is_outage(error) or is_full(error)


@contextlib.contextmanager
def skip_if_full() -> Iterator[None]:
    """Log and skip the rest of the block if Redis is full; other errors are raised."""
    try:
        yield
    except redis.ResponseError as error:
        if not is_full(error):
            raise
        log.warning(
            "Redis full: writes refused",
            hint="start a coordinator, which drains results, or raise maxmemory",
        )


def text(value: Any) -> str:
    """A reply of Redis as text."""
    return value.decode() if isinstance(value, bytes) else str(value)


def version_of(info: Mapping[str, object]) -> tuple[str, Version]:
    """Name and version of a server, by its answer to INFO; Valkey says that it is a Redis, too."""
    name = "Valkey" if "valkey_version" in info else "Redis"
    return name, tuple(int(part) for part in text(info[f"{name.lower()}_version"]).split(".")[:3])


def first_safe(name: str, version: Version) -> Version | None:
    """Return the first version without known holes if this one is older, else None.

    It is one of the same branch, or of the next branch with fixes.
    """
    fixes = _VALKEY if name == "Valkey" else _REDIS
    fix = next((fix for fix in fixes if version[:2] <= fix[:2]), None)
    return fix if fix is not None and version < fix else None
