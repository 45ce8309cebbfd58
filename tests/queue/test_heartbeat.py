"""WorkerStatus of workers in a real Redis."""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Callable

import pytest
import redis
from redis.backoff import NoBackoff
from redis.retry import Retry

from tuna.queue.heartbeat import HeartbeatBoard, HeartbeatSender, WorkerStatus

_ONE = WorkerStatus(
    "a:1", "eval", "a", 1, "card", "0123456789abcdef", ("tvm-0.27",), (5, 6), 1.0, 2.0, 7
)


def test_a_worker_that_announces_itself_is_live_just_as_it_said(redis_client: redis.Redis) -> None:
    board = HeartbeatBoard(redis_client, "n", 10)
    assert board.live() == []
    other = dataclasses.replace(_ONE, name="b:2", job_ids=())
    board.announce(other)
    board.announce(_ONE)
    assert board.live() == [_ONE, other]
    assert HeartbeatBoard(redis_client, "another", 10).live() == []


def test_a_silent_worker_is_forgotten(
    redis_client: redis.Redis, eventually: Callable[..., None]
) -> None:
    board = HeartbeatBoard(redis_client, "n", 0.05)
    board.announce(_ONE)
    eventually(lambda: board.live() == [], 60)
    assert redis_client.keys("*") == []


def test_a_removed_worker_is_gone_at_once(redis_client: redis.Redis) -> None:
    board = HeartbeatBoard(redis_client, "n", 10)
    board.announce(_ONE)
    board.remove(_ONE.name)
    board.remove("never heard of")
    assert board.live() == []


def test_a_worker_that_has_just_begun_is_not_taken_for_alone(redis_client: redis.Redis) -> None:
    """Whatever was read a moment ago."""
    board = HeartbeatBoard(redis_client, "n", 10)
    board.announce(dataclasses.replace(_ONE, place="here"))
    assert board.is_alone("here")
    board.announce(dataclasses.replace(_ONE, name="b:2", place="new"))
    assert not board.is_alone("new")


def test_what_is_not_a_status_or_somebody_elses_is_left_out(redis_client: redis.Redis) -> None:
    board = HeartbeatBoard(redis_client, "n", 10)
    board.announce(_ONE)
    changed = json.loads(_ONE.to_json()) | {"name": "changed"}
    for name, text in (
        ("junk", "{"), ("list", "[]"), ("part", '{"name": "part"}'), ("forged", _ONE.to_json()),
        ("deep", "[" * 200_000),
        *(("changed", json.dumps(changed | {field: "x"})) for field in ("done", "pid", "job_ids",
         "seen_at", "failing")),
        ("changed", json.dumps(changed | {"job_ids": ["x"]})), (b"\xff", "\xff"),
        ("changed", b"\xff"),
    ):  # fmt: skip
        redis_client.sadd("tuna:{n}:workers", name)
        redis_client.set(
            b"tuna:{n}:worker:" + (name if isinstance(name, bytes) else name.encode()), text
        )
        assert board.live() == [_ONE]
    redis_client.delete("tuna:{n}:worker:junk")
    redis_client.lpush("tuna:{n}:worker:junk", "of another type")
    assert board.live() == [_ONE]


def test_an_announcer_shows_what_is_in_hand_and_leaves_when_it_stops(
    redis_client: redis.Redis, eventually: Callable[..., None]
) -> None:
    board = HeartbeatBoard(redis_client, "n", 10)
    announcer = HeartbeatSender(board, dataclasses.replace(_ONE, job_ids=(), done=0), 60).start()
    assert len(board.live()) == 1, "before anything can be reported"
    announcer.begin([8, 9])
    eventually(lambda: board.live()[0].job_ids == (8, 9), 60)
    announcer.end(2)
    eventually(lambda: (board.live()[0].job_ids, board.live()[0].done) == ((), 2), 60)
    assert board.live()[0].seen_at > _ONE.seen_at
    announcer.stop()
    assert board.live() == []


def test_an_announcer_without_redis_is_only_unseen() -> None:
    board = HeartbeatBoard(
        redis.Redis(unix_socket_path="/nowhere", retry=Retry(NoBackoff(), 0)), "n", 10
    )
    announcer = HeartbeatSender(board, _ONE, 60).start()
    announcer.begin([1])
    announcer.stop()


@pytest.mark.parametrize("text", ["", "null", "{}", '{"name": 1}'])
def test_from_json_refuses_what_is_not_a_status(text: str) -> None:
    with pytest.raises(ValueError, match="validation error"):
        WorkerStatus.from_json(text)
