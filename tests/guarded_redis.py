"""A Redis that asks for a password, with an access list: its owner has the password, members get
users of their own."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator

import redis

from tuna.testing.servers import redis_server, with_password

ADMIN = "the admin's"


@contextlib.contextmanager
def guarded_redis(executable: str = "") -> Iterator[str]:
    """The URL, without the password, of such a Redis for the duration of a `with` block."""
    with redis_server("--requirepass", ADMIN, host="127.0.0.1", executable=executable) as url:
        yield url


def emptied(url: str) -> redis.Redis:
    """The owner's client of it, after its keys and all users but the owner were deleted."""
    client: redis.Redis = redis.Redis.from_url(with_password(url, ADMIN))
    client.flushall()
    for user in client.acl_users():
        if user != "default":
            client.acl_deluser(user)
    return client
