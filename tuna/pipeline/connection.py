"""Connections to Redis and the broker, from the settings; starts the embedded server when none is configured."""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Iterator
from typing import TYPE_CHECKING, Any
from urllib.parse import quote, urlsplit

import redis

from tuna import redis_client
from tuna.embedded_redis import EmbeddedRedis, socket_path
from tuna.errors import ServiceError
from tuna.settings import Settings

if TYPE_CHECKING:
    from kombu import Connection


def uses_embedded(settings: Settings) -> bool:
    """Whether the broker is the embedded Redis."""
    return settings.broker_url is None


@functools.cache
def _embedded(settings_home: str) -> EmbeddedRedis:
    from pathlib import Path

    return EmbeddedRedis(Path(settings_home))


def ensure_services(settings: Settings) -> None:
    """Start the embedded Redis if the settings name no broker; does nothing otherwise."""
    if uses_embedded(settings):
        _embedded(str(settings.run_dir)).acquire()


def release_services(settings: Settings) -> None:
    """Release the embedded Redis; the last process that uses it stops it."""
    if uses_embedded(settings):
        _embedded(str(settings.run_dir)).release()


def broker_url(settings: Settings) -> str:
    """Celery's broker URL, secrets included."""
    if settings.broker_url is not None:
        return settings.broker_url.get_secret_value()
    return f"redis+socket://{quote(str(socket_path(settings.run_dir)))}"


def redis_url(settings: Settings) -> str:
    """URL of the Redis that holds streams and leases, secrets included; raises ServiceError when there is none."""
    if settings.redis_url is not None:
        return settings.redis_url.get_secret_value()
    if settings.broker_url is None:
        return f"unix://{quote(str(socket_path(settings.run_dir)))}"
    url = settings.broker_url.get_secret_value()
    if url.partition(":")[0] in ("redis", "rediss"):
        return url
    raise ServiceError(
        "The broker is not Redis, so results and leases need a Redis of their own.",
        hint="set TUNA_REDIS_URL (or CELERY_RESULT_BACKEND) to a redis:// URL",
    )


def connect_admin(settings: Settings) -> redis.Redis:
    """The same as the Redis user that admits workers."""
    return connect(settings, settings.redis_admin_url.get_secret_value() if settings.redis_admin_url else "")


def connect(settings: Settings, url: str = "") -> redis.Redis:
    """A client that answers; raises ServiceError with the address (without its password)."""
    url = url or redis_url(settings)
    try:
        client = redis_client.retrying_client(url)
        client.ping()
    except ValueError:  # whose text would quote what it parses as a port, such as half a password
        hint = "write /, @, # and ? in a password as %2F, %40, %23 and %3F"
        raise ServiceError("The URL of Redis is not usable.", hint=hint) from None
    except (redis.RedisError, OSError) as error:
        parts = urlsplit(url)
        address = parts.path if parts.scheme == "unix" else f"{parts.hostname}:{parts.port or 6379}"
        raise ServiceError(f"Redis at {address} cannot be used: {error}", hint="run: `tuna doctor`") from None
    return client


@contextlib.contextmanager
def connect_broker(settings: Settings, wait_s: int) -> Iterator[Connection]:
    """A connection to the broker, of whichever kind; raises ServiceError unless it answers within `wait_s`."""
    from kombu import Connection

    url = broker_url(settings)
    with Connection(url, connect_timeout=wait_s) as connection:
        try:
            connection.ensure_connection(max_retries=1, interval_start=0, timeout=wait_s)
        except Exception as error:  # each transport raises its own errors
            parts = urlsplit(url)
            where = f"{parts.scheme} at {parts.hostname or 'localhost'}"
            raise ServiceError(f"The broker, {where}, does not answer: {error}", hint="see TUNA_BROKER_URL") from None
        yield connection


def queue_depth(connection: Any, queue: str) -> int:
    """Messages that wait in a queue of the broker; 0 if the queue does not exist.

    Uses a separate channel, because a broker closes the one on which a missing queue is declared passively.
    """
    channel = connection.channel()
    try:
        count = int(channel.queue_declare(queue, passive=True).message_count)
    except connection.channel_errors as error:
        if "NOT_FOUND" not in str(error):
            raise
        return 0
    channel.close()
    return count
