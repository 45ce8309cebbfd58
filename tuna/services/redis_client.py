"""Redis clients: retry policies, errors, decoding."""

from __future__ import annotations

import contextlib
import re
from collections.abc import Iterator
from typing import Any

import redis
import structlog
from redis.backoff import ExponentialBackoff, NoBackoff
from redis.retry import Retry

log = structlog.get_logger(__name__)


def retrying_client(url: str, **options: Any) -> redis.Redis:
    """A client that retries for a few seconds while the server is unreachable; not connected yet.
    Raises ValueError for a URL that is not usable."""
    retry = Retry(ExponentialBackoff(cap=1.0, base=0.05), 4)
    client: redis.Redis = redis.Redis.from_url(
        url, socket_connect_timeout=5, retry=retry, **options
    )
    return client


def single_attempt_client(url: str, wait_s: float) -> redis.Redis:
    """A client without retries, with `wait_s` as connect and read timeout. Raises ValueError for an
    unusable URL."""
    client: redis.Redis = redis.Redis.from_url(
        url, socket_connect_timeout=wait_s, socket_timeout=wait_s, retry=Retry(NoBackoff(), 0)
    )
    return client


def is_full(error: BaseException) -> bool:
    """True if Redis refused a command because maxmemory is reached; the class differs between
    scripts and versions."""
    return isinstance(error, redis.ResponseError) and "maxmemory" in str(error)


#: What a Redis answers that cannot take writes now: during a failover, without its replicas, while
#: it cannot save or loads its data, or runs a long script. Within a script the code follows other
#: words.
_UNABLE = re.compile(
    r"\b(READONLY|NOREPLICAS|MISCONF|MASTERDOWN|CLUSTERDOWN|TRYAGAIN|LOADING|BUSY)\b|read only"
    r" replica"
)
#: The same as classes, whose words redis-py takes the code from.
_UNABLE_CLASSES = (
    redis.exceptions.NoScriptError,
    redis.exceptions.ReadOnlyError,
    redis.exceptions.ClusterDownError,  # MASTERDOWN too
    redis.exceptions.TryAgainError,
)


def is_outage(error: BaseException) -> bool:
    """True if Redis is unreachable or takes no writes for a while, so that the same command may
    succeed later.

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
    """True if the same command may succeed later: Redis is unreachable, or full until a coordinator
    drains it."""
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
