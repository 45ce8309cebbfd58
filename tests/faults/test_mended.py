"""Regression tests of bugs that fault injection found."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager
from pathlib import Path
from typing import Any
from unittest import mock

import pymysql
import pytest
import redis
from fault_library import FaultLibrary
from redis._parsers.base import BaseParser
from redis.commands.core import Script
from sqlalchemy.exc import OperationalError

from tuna.artifacts.files import RedisFiles
from tuna.artifacts.store import Artifacts
from tuna.configs import GemmConfig
from tuna.db.engine import is_outage, make_engine, reading
from tuna.errors import DatabaseError, StorageFull, StoreUnavailable
from tuna.libraries.base import Step
from tuna.libraries.context import RunContext
from tuna.libraries.items import StepResult, WorkItem, result_of
from tuna.queue.leases import Leases
from tuna.queue.messages import Chunk, ReportKind
from tuna.queue.results import ResultStream
from tuna.services.redis_client import is_outage as is_outage_of_redis
from tuna.testing.noop import NoopLibrary
from tuna.workers import runner
from tuna.workers.link import RedisLink


class _Full(FaultLibrary):
    """The artifact store fails with `error` after one item."""

    def __init__(self, error: Exception) -> None:
        self._error = error

    def run(
        self, step: Step, items: Sequence[WorkItem], context: RunContext
    ) -> Iterator[StepResult]:
        yield result_of(items[0], ok=True)
        raise self._error


@pytest.mark.parametrize("error", [StorageFull("no room"), StoreUnavailable("no room")])
def test_a_worker_without_room_gives_back_what_it_could_not_store(
    redis_client: redis.Redis, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, error: Exception
) -> None:
    monkeypatch.setattr(runner, "_BACKOFF_S", 0.0)
    chunk, leases = _chunk(tuple(_item(number) for number in (1, 2, 3))), _leases(redis_client)
    context = RunContext(Artifacts(tmp_path.as_uri(), tmp_path), tmp_path, (0,))
    assert (
        runner.Runner(RedisLink(redis_client, 2.0), context).run(chunk, _Full(error)) == "returned"
    )
    report = ResultStream(redis_client, leases.results_key, "me").read(10, None)[-1].report
    assert report
    assert (report.kind, report.reason) == (ReportKind.RETURNED, "no room")
    assert [result.job_id for result in report.results] == [1]


class _Refused(FaultLibrary):
    """Redis refuses writes while the second item is built."""

    def __init__(self, refuse: Callable[[], AbstractContextManager[object]]) -> None:
        self._refuse = refuse

    def run(
        self, step: Step, items: Sequence[WorkItem], context: RunContext
    ) -> Iterator[StepResult]:
        for number, item in enumerate(items):
            with self._refuse() if number == 1 else contextlib.nullcontext():
                context.artifacts.put(b"code")
            yield result_of(item, ok=True)


_NOT_SAVED = (
    "MISCONF Redis is configured to save RDB snapshots, but it's currently unable to persist to"
    " disk."
)


@contextlib.contextmanager
def _refusing(client: redis.Redis, words: str) -> Iterator[None]:
    """Redis refuses writes; in its own words where that takes no broken disk and no time."""
    with pytest.MonkeyPatch.context() as patch:
        if words == "READONLY":
            client.replicaof("127.0.0.1", "1")
        elif words == "NOREPLICAS":
            client.config_set("min-replicas-to-write", "1")
        elif words == "OOM":
            client.config_set("maxmemory", "1")
        else:
            parsed = BaseParser.parse_error(words)
            patch.setattr(Script, "__call__", mock.Mock(side_effect=parsed))
        try:
            yield
        finally:
            client.replicaof("NO", "ONE")
            client.config_set("min-replicas-to-write", "0")
            client.config_set("maxmemory", "0")


@pytest.mark.parametrize(
    "words",
    [
        "READONLY",
        "NOREPLICAS",
        "OOM",
        _NOT_SAVED,
        "LOADING Redis is loading the dataset in memory",
        "MASTERDOWN Link with MASTER is down and replica-serve-stale-data is set to 'no'.",
        "CLUSTERDOWN The cluster is down",
        "TRYAGAIN Multiple keys request during rehashing of slot",
    ],
)
def test_an_artifact_that_redis_refuses_is_no_jobs_fault(
    words: str, redis_client: redis.Redis, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """No open job of the chunk is charged with `infra`."""
    monkeypatch.setattr(runner, "_BACKOFF_S", 0.0)
    items = tuple(_item(number) for number in (1, 2, 3))
    leases, store = (
        _leases(redis_client),
        Artifacts(RedisFiles(redis_client, "n", 1 << 20, wait_s=0.0), tmp_path),
    )
    context = RunContext(store, tmp_path, (0,))
    library = _Refused(lambda: _refusing(redis_client, words))
    assert (
        runner.Runner(RedisLink(redis_client, 2.0), context).run(_chunk(items), library)
        == "returned"
    )
    reports = [
        entry.report
        for entry in ResultStream(redis_client, leases.results_key, "me").read(10, None)
    ]
    assert [report.kind for report in reports if report] == [
        ReportKind.STARTED,
        ReportKind.RETURNED,
    ]
    results = [result for report in reports if report for result in report.results]
    assert [(result.job_id, result.ok) for result in results] == [(1, True)]


def _item(job_id: int) -> WorkItem:
    config = GemmConfig(m=8, n=8, k=8).to_json()
    return WorkItem(
        job_id=job_id,
        attempt=1,
        session_id=1,
        library="faults",
        step="build",
        solver="Fault0",
        config=config,
    )


def _chunk(items: tuple[WorkItem, ...]) -> Chunk:
    return Chunk(
        id="c",
        namespace="n",
        library="faults",
        step="build",
        environment="",
        toolchain="faults-1",
        items=items,
    )


def _leases(client: redis.Redis) -> Leases:
    leases = Leases(client, "n", 2.0)
    leases.open(["c"])
    return leases


@pytest.mark.parametrize("words", ["READONLY", "NOREPLICAS"])
def test_a_chunk_is_taken_once_redis_takes_writes_again(
    words: str, redis_client: redis.Redis, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its message was lost, and its jobs failed for that, uncharged."""
    leases, context = (
        _leases(redis_client),
        RunContext(Artifacts(tmp_path.as_uri(), tmp_path), tmp_path, (0,)),
    )
    refusing = contextlib.ExitStack()
    refusing.enter_context(_refusing(redis_client, words))
    taken: list[bool] = []
    take = Leases.take

    def again(self: Leases, *args: str) -> bool:
        taken.append(True)
        if len(taken) == 3:
            refusing.close()
        return take(self, *args)

    monkeypatch.setattr(Leases, "take", again)
    with refusing:
        outcome = runner.Runner(RedisLink(redis_client, 2.0), context).run(
            _chunk((_item(1),)), NoopLibrary()
        )
    assert (outcome, len(taken)) == ("finished", 3)
    assert redis_client.xlen(leases.results_key) == 2


def test_who_asks_again_after_the_answer_was_lost_still_has_the_lease(
    redis_client: redis.Redis,
) -> None:
    leases = Leases(redis_client, "n", 2.0)
    leases.open(["c"])
    assert leases.take("c", "me", "{}")
    assert leases.take("c", "me", "{}")
    assert not leases.take("c", "other", "{}")
    assert redis_client.xlen(leases.results_key) == 1


def test_a_stream_that_is_wiped_while_the_drain_waits_is_opened_again(
    redis_client: redis.Redis, monkeypatch: pytest.MonkeyPatch
) -> None:
    stream = ResultStream(redis_client, "s", "me")

    def wiped(*_: Any, **__: Any) -> None:  # what Redis 7 answers; Redis 6 gives an empty answer
        redis_client.flushall()
        raise redis.ResponseError("UNBLOCKED the stream key no longer exists")

    with monkeypatch.context() as patch:
        patch.setattr(redis_client, "xreadgroup", wiped)
        assert stream.read(1, 10) == []
    redis_client.xadd("s", {"r": "{}"})
    assert len(stream.read(1, None)) == 1


@pytest.mark.parametrize(
    ("code", "away"), [(2003, True), (2006, True), (2013, True), (1045, False), (1213, True)]
)
def test_a_server_that_is_away_is_told_from_one_that_refuses(code: int, away: bool) -> None:
    error = OperationalError("SELECT 1", {}, pymysql.err.OperationalError(code, "words"))
    assert is_outage(error) is away
    explained = DatabaseError("words")
    explained.__cause__ = error
    assert is_outage(explained) is away


@pytest.mark.parametrize(
    ("text", "away"),
    [
        ("READONLY You can't write against a read only replica.", True),
        ("NOREPLICAS Not enough good replicas to write.", True),
        (
            (
                "MISCONF Redis is configured to save RDB snapshots, but it's currently unable to"
                " persist to disk."
            ),
            True,
        ),
        (
            (
                "Error running script (call to f_43): @user_script:9: -NOREPLICAS Not enough good"
                " replicas to write."
            ),
            True,
        ),
        ("BUSY Redis is busy running a script.", True),
        ("BUSYGROUP Consumer Group name already exists", False),
        ("WRONGTYPE Operation against a key holding the wrong kind of value", False),
    ],
)
def test_a_redis_that_takes_no_writes_for_a_while_is_told_from_one_that_refuses(
    text: str, away: bool
) -> None:
    assert is_outage_of_redis(redis.ResponseError(text)) is away
    assert not is_outage_of_redis(redis.AuthenticationError(text))


def test_a_server_that_nobody_started_is_away() -> None:
    with (
        pytest.raises(DatabaseError) as caught,
        reading(make_engine("mysql+pymysql://root@127.0.0.1:1/tuna")),
    ):
        pass
    assert is_outage(caught.value)
