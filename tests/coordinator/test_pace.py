"""Chunks follow from how long items take, and keep what belongs together."""

from __future__ import annotations

import pytest
import redis
import sqlalchemy as sa
from jobs_builder import claim, make_jobs

from tuna.coordinator.pace import Pace
from tuna.libraries.base import Step
from tuna.libraries.items import StepResult
from tuna.libraries.registry import get_library
from tuna.queue.results import memory_of
from tuna.vocabulary import Resource

STEP = Step("build", Resource.CPU, chunk=8)


def result(seconds: float, *, ok: bool = True, step: str = "build") -> StepResult:
    return StepResult(
        job_id=1, attempt=1, step=step, ok=ok, started_at=100.0, ended_at=100.0 + seconds
    )


@pytest.mark.parametrize(
    ("seconds", "size"),
    [(0.0, 128), (0.09, 22), (0.19, 10), (1.0, 8), (7.0, 8), (9.0, 6), (59.0, 1), (900.0, 1)],
)
def test_short_items_travel_in_numbers_and_long_ones_alone(seconds: float, size: int) -> None:
    pace = Pace()
    for _ in range(50):
        pace.note(1, result(seconds))
        pace.note(1, result(3000.0, ok=False))
    assert pace.chunk_size(1, STEP) == size
    assert pace.chunk_size(2, STEP) == 8, "another session's items may take another time"


def test_items_are_long_by_the_average_of_the_latest_ones_good_or_not() -> None:
    pace, key = Pace(), (1, "build")
    assert pace.queued_per_process([key]) == 0, "nothing is known"
    pace.note(1, result(1.0))
    assert pace.queued_per_process([key]) == 1
    for _ in range(2):
        pace.note(1, result(0.01, ok=False))
    assert pace.queued_per_process([key]) is None, (
        "what fails at once leaves a process without work as soon as what succeeds"
    )
    for _ in range(5):
        pace.note(1, result(1.5))
    assert pace.queued_per_process([key]) == 1
    assert pace.queued_per_process([(2, "build")]) == 0


def test_nothing_waits_where_the_steps_of_a_queue_are_very_long_together() -> None:
    pace = Pace()
    keys = [(session_id, step) for session_id in (1, 2) for step in ("build", "update")]
    for seconds, step in [(3.0, "build"), (16.0, "update")] * 3:
        for session_id in (1, 2):
            pace.note(session_id, result(seconds, step=step))
    assert pace.queued_per_process(keys) == 1
    assert pace.queued_per_process([(1, "update")]) == 0
    for _ in range(3):
        pace.note(2, result(19.0, step="update"))
    assert pace.queued_per_process(keys) == 0, "each counts as often as it runs"
    for _ in range(10):
        pace.note(3, result(0.1, step="build"))
    assert pace.queued_per_process(keys) == 0, "another queue's steps do not count"
    assert pace.queued_per_process([*keys, (3, "build")]) is None, "a step is short"
    for _ in range(3):
        pace.note(2, result(60.0, step="update"))
    assert pace.queued_per_process([*keys, (3, "build")]) == 0, "it matters little"


def test_the_step_decides_until_enough_is_known() -> None:
    pace = Pace()
    for _ in range(10):
        pace.note(1, result(900.0))
    assert pace.chunk_size(1, STEP) == 8


@pytest.mark.parametrize(
    ("size", "expected"), [(4, [4, 4, 2] * 3), (10, [10] * 3), (15, [10] * 3), (20, [20, 10])]
)
def test_a_config_is_split_only_where_it_does_not_fit(
    engine: sa.Engine, size: int, expected: list[int]
) -> None:
    session_id, library = make_jobs(engine, 3), get_library("noop")
    chunks = claim(engine, session_id, "build", 1000, size, library=library)
    assert [len(chunk.items) for chunk in chunks] == expected
    assert len({item.job_id for chunk in chunks for item in chunk.items}) == 30


def test_redis_is_nearly_full_before_it_refuses_results(redis_client: redis.Redis) -> None:
    assert not memory_of(redis_client).nearly_full, "there is no bound"
    used = redis_client.info("memory")["used_memory"]
    try:
        redis_client.config_set("maxmemory", 10 * used)
        assert not memory_of(redis_client).nearly_full
        redis_client.config_set("maxmemory", int(used * 1.2))
        assert memory_of(redis_client).nearly_full
    finally:
        redis_client.config_set("maxmemory", 0)
