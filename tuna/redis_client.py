"""Clients of Redis: how patient they are, and what they answer as text."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from typing import Any

import redis
import structlog
from redis.backoff import ExponentialBackoff, NoBackoff
from redis.retry import Retry

log = structlog.get_logger(__name__)


def patient(url: str, **options: Any) -> redis.Redis:
    """A client that gets over a short absence of the server; nothing is asked yet. Raises ValueError for the URL."""
    retry = Retry(ExponentialBackoff(cap=1.0, base=0.05), 4)
    client: redis.Redis = redis.Redis.from_url(url, socket_connect_timeout=5, retry=retry, **options)
    return client


def hasty(url: str, wait_s: float) -> redis.Redis:
    """A client that asks once and waits for `wait_s` at most. Raises ValueError for the URL."""
    client: redis.Redis = redis.Redis.from_url(
        url, socket_connect_timeout=wait_s, socket_timeout=wait_s, retry=Retry(NoBackoff(), 0)
    )
    return client


def is_full(error: BaseException) -> bool:
    """Whether Redis refused a command for want of memory; its class differs between scripts and versions."""
    return isinstance(error, redis.ResponseError) and "maxmemory" in str(error)


@contextlib.contextmanager
def unless_full() -> Iterator[None]:
    """Leave out what Redis has no memory for, and say so."""
    try:
        yield
    except redis.ResponseError as error:
        if not is_full(error):
            raise
        log.warning("Redis is full: it takes nothing new until results are drained, or its maxmemory is raised")


def text(value: Any) -> str:
    """A name or an id that Redis answered with."""
    return value.decode() if isinstance(value, bytes) else str(value)
