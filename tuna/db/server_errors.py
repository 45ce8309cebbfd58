"""The kind of an error of Redis, the broker, SQL or the artifact store: whether waiting, room or
another value would help."""

from __future__ import annotations

from enum import Enum

import redis
from kombu.exceptions import OperationalError
from sqlalchemy.exc import DataError, DBAPIError, IntegrityError

from tuna.db import engine
from tuna.errors import DatabaseError, StorageFull, StoreUnavailable
from tuna.services import redis_client


class ErrorKind(str, Enum):
    """Kinds of errors."""

    #: unreachable or unable for a while: the same may succeed later
    OUTAGE = "outage"
    FULL = "full"  #: no space left: the same succeeds once there is space
    REFUSED = "refused"  #: refused by the database because of a value in a row
    BUG = "bug"  #: any other error, a bug in Tuna


def kind(error: BaseException) -> ErrorKind:
    """The kind of the error."""
    if isinstance(error, StorageFull) or redis_client.is_full(error):
        return ErrorKind.FULL
    unreachable = isinstance(error, OperationalError | ConnectionError | StoreUnavailable)
    if unreachable or redis_client.is_outage(error) or engine.is_outage(error):
        return ErrorKind.OUTAGE
    return ErrorKind.REFUSED if isinstance(error, DataError | IntegrityError) else ErrorKind.BUG


def is_passing(error: BaseException) -> bool:
    """Whether a repetition may succeed: an outage passes, a full Redis is drained, a full disk gets
    room from its owner."""
    return kind(error) in (ErrorKind.OUTAGE, ErrorKind.FULL)


def server(error: BaseException) -> str:
    """The server that an outage or a lack of space is of, as in a sentence."""
    if isinstance(error, DBAPIError | DatabaseError):
        return "the database"
    if isinstance(error, StoreUnavailable):
        return "the artifact store"
    if isinstance(error, redis.RedisError):
        return "Redis"
    return "space on a disk" if isinstance(error, StorageFull) else "the broker"


def words(error: BaseException) -> str:
    """The server's message, in short."""
    return str(error.orig if isinstance(error, DBAPIError) else error)[:1000]
