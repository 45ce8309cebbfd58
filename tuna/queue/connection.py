"""Connections to Redis and the broker, from the settings; starts the embedded server when none is
configured."""

from __future__ import annotations

import contextlib
import functools
import time
import warnings
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any
from urllib.parse import urlsplit

import redis
import structlog

from tuna.common import tls
from tuna.errors import ServiceError
from tuna.services import embedded_redis, redis_client
from tuna.services.embedded_redis import EmbeddedRedis
from tuna.settings import Settings

if TYPE_CHECKING:
    from celery import Celery
    from kombu import Connection

log = structlog.get_logger(__name__)

#: Seconds between two attempts to reach Redis
_RETRY_S = 0.5
#: Seconds after which a message that a dead worker held is delivered again. A copy of a chunk that
#: is still held, or was returned since, is dropped by its lease, so the value only decides how soon
#: stale messages are removed.
_VISIBILITY_S = 300
#: Timeouts and retries of kombu's Redis clients, in place of redis-py's defaults; other transports
#: ignore them
_REDIS_WAITS = {
    "socket_connect_timeout": redis_client.CONNECT_S,
    "socket_timeout": redis_client.ANSWER_S,
}


def uses_embedded(settings: Settings) -> bool:
    """True if the broker is the embedded Redis."""
    return settings.broker_url is None


@functools.cache
def _of_folder(run_dir: Path) -> EmbeddedRedis:
    return EmbeddedRedis(run_dir)


def embedded(settings: Settings) -> EmbeddedRedis:
    """This process's reference to the embedded Redis of the settings' home."""
    return _of_folder(settings.run_dir)


def ensure_services(settings: Settings) -> None:
    """Start the embedded Redis if the settings name no broker; does nothing otherwise."""
    if uses_embedded(settings):
        embedded(settings).acquire()


def release_services(settings: Settings) -> None:
    """Release the embedded Redis; the last process that uses it stops it."""
    if uses_embedded(settings):
        embedded(settings).release()


def broker_url(settings: Settings) -> str:
    """Celery's broker URL, secrets included."""
    if settings.broker_url is not None:
        return settings.broker_url.get_secret_value()
    return embedded_redis.url(settings.run_dir).replace("unix:", "redis+socket:", 1)


def make_celery(settings: Settings) -> Celery:
    """A Celery app for the settings' broker; what only publishes to it needs no more."""
    from celery import Celery
    from celery.exceptions import CPendingDeprecationWarning

    url, use_ssl = tls.for_celery(broker_url(settings))
    made = Celery("tuna", broker=url)
    made.backend_cls = "disabled"  # else Celery makes one of CELERY_RESULT_BACKEND
    made.conf.update(
        broker_read_url=url,  # else Celery prefers CELERY_BROKER_URL to what it is given
        broker_write_url=url,
        broker_use_ssl=use_ssl,
        accept_content=["json"],
        task_serializer="json",
        task_ignore_result=True,
        task_acks_late=True,
        # expiry of the lease requeues the jobs, and counts the attempt
        task_reject_on_worker_lost=False,
        worker_prefetch_multiplier=1,
        # the lease decides who holds a chunk
        worker_cancel_long_running_tasks_on_connection_loss=False,
        worker_hijack_root_logger=False,
        broker_connection_retry_on_startup=True,
        broker_connection_max_retries=None,  # an outage of the broker may last a night
        broker_channel_error_retry=True,  # it may be full, or its acknowledgement timeout exceeded
        broker_transport_options={"visibility_timeout": _VISIBILITY_S, **_REDIS_WAITS},
        task_default_queue="tuna",
        task_create_missing_queues=True,
        enable_utc=True,
    )
    # At each lost connection Celery warns about a setting that is set above.
    warnings.filterwarnings(
        "ignore", r"\s*In Celery 5\.1 we introduced", CPendingDeprecationWarning
    )
    return made


def redis_url(settings: Settings) -> str:
    """URL of the Redis that holds streams and leases, secrets included; raises ServiceError when
    there is none."""
    if settings.redis_url is not None:
        return settings.redis_url.get_secret_value()
    if settings.broker_url is None:
        return embedded_redis.url(settings.run_dir)
    url = settings.broker_url.get_secret_value()
    if url.partition(":")[0] in ("redis", "rediss"):
        return url
    raise ServiceError(
        "The broker is not Redis, so results and leases need a Redis of their own.",
        hint="set TUNA_REDIS_URL (or CELERY_RESULT_BACKEND) to a redis:// URL",
    )


def connect(settings: Settings, *, wait_s: float = 0.0) -> redis.Redis:
    """Return a client that answers; an outage is waited for up to `wait_s`. Raises ServiceError
    with the address (without its password)."""
    url = redis_url(settings)
    client = _client(url)
    try:
        with _client(url, redis_client.CONNECT_S) as first:
            _wait_for(first, wait_s)
    except (redis.RedisError, OSError) as error:
        parts = urlsplit(url)
        address = parts.path if parts.scheme == "unix" else f"{parts.hostname}:{parts.port or 6379}"
        raise ServiceError(
            f"Redis at {address} cannot be used: {error}", hint="run: `tuna doctor`"
        ) from None
    return client


def _wait_for(client: redis.Redis, wait_s: float) -> None:
    until_s = time.monotonic() + wait_s
    logged = False
    while True:
        try:
            client.ping()
            return
        except (redis.RedisError, OSError) as error:
            if time.monotonic() >= until_s or not redis_client.is_outage(error):
                raise
            if not logged:
                log.warning("waiting for Redis", reason=str(error), most_s=wait_s)
                logged = True
            time.sleep(_RETRY_S)


def impatient_client(settings: Settings, wait_s: float) -> redis.Redis:
    """Return a client that has not connected yet, and waits `wait_s` for an answer."""
    return _client(redis_url(settings), wait_s)


def _client(url: str, wait_s: float | None = None) -> redis.Redis:
    try:
        return (
            redis_client.single_attempt_client(url, wait_s)
            if wait_s
            else redis_client.retrying_client(url)
        )
    except ValueError:  # whose text would quote what it parses as a port, such as half a password
        hint = "write /, @, # and ? in a password as %2F, %40, %23 and %3F"
        raise ServiceError("The URL of Redis is not usable.", hint=hint) from None


@contextlib.contextmanager
def connect_broker(settings: Settings, wait_s: int) -> Iterator[Connection]:
    """A connection to the broker, of whichever kind; raises ServiceError unless it answers within
    `wait_s`."""
    from kombu import Connection

    url, use_ssl = tls.for_celery(broker_url(settings))
    with Connection(url, ssl=use_ssl or False, connect_timeout=wait_s) as connection:
        try:
            plain = broker_url(settings).replace("redis+socket:", "unix:", 1)
            if plain.startswith(("redis:", "rediss:", "unix:")):  # kombu asks eleven times
                redis_client.single_attempt_client(plain, wait_s).ping()
            connection.ensure_connection(max_retries=1, interval_start=0, timeout=wait_s)
        except Exception as error:  # each transport raises its own errors
            parts = urlsplit(url)
            where = f"{parts.scheme} at {parts.hostname or 'localhost'}"
            raise ServiceError(
                f"The broker, {where}, does not answer: {error}", hint="see TUNA_BROKER_URL"
            ) from None
        yield connection


def queue_depth(connection: Any, queue: str) -> int:
    """Messages that wait in a queue of the broker; 0 if the queue does not exist.

    Uses a separate channel, because a broker closes the one on which a missing queue is declared
    passively.
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
