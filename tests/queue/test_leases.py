"""Leases in a real Redis."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import redis

from tuna.queue.leases import Leases


def test_a_chunk_is_taken_once(redis_client: redis.Redis) -> None:
    leases = Leases(redis_client, "n", 10)
    leases.open(["c"])
    assert leases.take("c", "first", "x")
    assert not leases.take("c", "second", "x")
    assert leases.untaken() == []


def test_a_chunk_that_nobody_announced_cannot_be_taken(redis_client: redis.Redis) -> None:
    assert not Leases(redis_client, "n", 10).take("c", "t", "x")


def test_only_the_holder_can_report_renew_and_finish(redis_client: redis.Redis) -> None:
    leases = Leases(redis_client, "n", 10)
    leases.open(["c"])
    leases.take("c", "holder", "started")
    for call in (leases.report, leases.finish):
        assert not call("c", "stranger", "forged")
    assert not leases.renew("c", "stranger")
    assert leases.renew("c", "holder")
    assert leases.report("c", "holder", "some")
    assert leases.finish("c", "holder", "all")
    assert [fields[b"r"] for _, fields in redis_client.xrange(leases.results_key)] == [
        b"started",
        b"some",
        b"all",
    ]
    assert leases.missing(["c"]) == ["c"]


def test_a_lease_that_is_not_renewed_expires_and_its_holder_is_shut_out_once_it_is_dropped(
    redis_client: redis.Redis, eventually: Callable[..., None]
) -> None:
    leases = Leases(redis_client, "n", 0.05)
    leases.open(["c", "waiting"])
    leases.take("c", "t", "x")
    eventually(lambda: leases.expired() == ["c"], 60)
    leases.drop(["c"])
    assert not leases.report("c", "t", "late")
    assert leases.expired() == []
    assert leases.untaken() == ["waiting"]


def test_a_full_redis_takes_no_renewal(redis_client: redis.Redis) -> None:
    """So a lease that expired meanwhile says nothing of its worker, and is not named."""
    leases = Leases(redis_client, "n", 10)
    leases.open(["c", "d"])
    leases.take("c", "t", "")
    leases.forfeit("c")
    assert leases.expired() == ["c"]
    redis_client.config_set("maxmemory", "1")
    try:
        for refused in (lambda: leases.renew("c", "t"), leases.expired):
            with pytest.raises(redis.ResponseError, match="maxmemory"):
                refused()
    finally:
        redis_client.config_set("maxmemory", "0")
    assert leases.expired() == ["c"]
    assert leases.all() == ["c", "d"]


def test_a_forfeited_lease_expires_at_once(redis_client: redis.Redis) -> None:
    leases = Leases(redis_client, "n", 100)
    leases.open(["c"])
    leases.take("c", "t", "x")
    leases.forfeit("c")
    leases.forfeit("never heard of")
    assert leases.expired() == ["c"]


def test_after_redis_was_wiped_nothing_can_be_reported(redis_client: redis.Redis) -> None:
    leases = Leases(redis_client, "n", 10)
    leases.open(["c"])
    leases.take("c", "t", "x")
    redis_client.flushall()
    assert not leases.finish("c", "t", "late")
    assert leases.missing(["c"]) == ["c"]


def test_two_databases_in_one_redis_do_not_meet(redis_client: redis.Redis) -> None:
    Leases(redis_client, "tuna", 10).open(["c"])
    assert not Leases(redis_client, "prod_tuna", 10).take("c", "t", "x")
