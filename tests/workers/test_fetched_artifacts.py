"""Winners' artifacts are read from the store before SQL's write transaction, several at a
time."""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import redis
import sqlalchemy as sa
from jobs_builder import claim, finished, make_jobs, states
from queries import read_column, read_value

from tuna.artifacts.files import UrlFiles
from tuna.artifacts.store import Artifacts
from tuna.coordinator import find_db_writer
from tuna.coordinator.drain import Drain
from tuna.db.engine import writing
from tuna.db.models import FindDb, FindDbKernel, KernelRow, StepResultRow
from tuna.libraries.items import Trial, result_of
from tuna.libraries.registry import get_library
from tuna.queue.results import ResultStream

LIBRARY = get_library("noop")


class Scene:
    """Jobs that are built, each with its own artifact; the store notes what is read, and whether a
    transaction is open."""

    def __init__(
        self,
        engine: sa.Engine,
        client: redis.Redis,
        folder: Path,
        monkeypatch: pytest.MonkeyPatch,
        solvers: int,
    ) -> None:
        self.engine, self.open = engine, 0
        files = UrlFiles((folder / "a").as_uri())
        self.read: list[str] = []
        self.within: list[str] = []
        self.before_read: Any = lambda: None
        plain = files.read

        def read(name: str) -> bytes:
            self.before_read()
            (self.within if self.open else self.read).append(name)
            return plain(name)

        @contextlib.contextmanager
        def noted(of: sa.Engine) -> Iterator[sa.Connection]:
            with writing(of) as connection:
                self.open += 1
                try:
                    yield connection
                finally:
                    self.open -= 1

        monkeypatch.setattr(files, "read", read)
        monkeypatch.setattr("tuna.db.engine.writing", noted)  # of `transaction`
        self.store = Artifacts(files, folder / "c")
        self.drain = Drain(engine, ResultStream(client, "results", "me"), self.store, 3)
        self.session_id = make_jobs(
            engine, 1, solvers=[f"Noop{number}" for number in range(solvers)]
        )
        self.digests = [self.store.put(f"code {number}".encode()) for number in range(solvers)]
        self.write(
            "build",
            lambda n: {"artifact": self.digests[n], "params": "p"},
            workload=self.store.put(b"text"),
        )
        self.read.clear()

    def write(self, step: str, facts: Any, **more: object) -> None:
        chunks = claim(self.engine, self.session_id, step, 100)
        for chunk in chunks:
            results = (
                result_of(item, ok=True, trials=(Trial(index=0, **facts(n)),), **more)
                for n, item in enumerate(chunk.items)
            )
            self.drain.write([finished(chunk.id, results)])

    def measure(self) -> None:
        self.write("measure", lambda _: {"time_ms": 1.5, "times_ms": (1.5,)})

    def count(self, of: Any) -> int:
        return read_value(self.engine, sa.select(sa.func.count()).select_from(of))


@pytest.fixture()
def scene(
    engine: sa.Engine, redis_client: redis.Redis, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> Any:
    return lambda solvers: Scene(engine, redis_client, tmp_path, monkeypatch, solvers)


def test_nothing_is_read_from_the_store_within_the_transaction(scene: Any) -> None:
    one = scene(5)
    one.measure()
    assert (len(one.read), one.within) == (6, []), "five artifacts, and the text that they share"
    assert (
        states(one.engine),
        one.count(FindDb),
        one.count(FindDbKernel),
        one.count(KernelRow),
    ) == (
        {"evaluated": 5},
        5,
        5,
        6,
    )


def test_several_are_read_at_once(scene: Any) -> None:
    one = scene(3)
    # each read goes on once all four have begun
    one.before_read = threading.Barrier(4, timeout=120).wait
    one.measure()
    assert states(one.engine) == {"evaluated": 3}


def test_what_is_in_sql_is_not_read_again(scene: Any) -> None:
    one = scene(2)
    with writing(one.engine) as connection:
        for digest, blob in ((one.digests[0], b"code 0"), (one.digests[1], b"code 1")):
            connection.execute(sa.insert(KernelRow).values(digest=digest, blob=blob, size_bytes=6))
    one.measure()
    assert (len(one.read), one.within) == (1, []), "the text"
    assert states(one.engine) == {"evaluated": 2}


def test_an_artifact_that_is_lost_fails_its_own_job_only(scene: Any, tmp_path: Path) -> None:
    one = scene(3)
    (tmp_path / "a" / one.digests[1][:2] / one.digests[1]).unlink()
    one.measure()
    assert states(one.engine) == {"evaluated": 2, "new": 1}
    (cause,) = read_column(
        one.engine, sa.select(StepResultRow.cause).where(StepResultRow.ok.is_(False))
    )
    assert cause == "artifact_lost"
    assert one.within == []


def test_more_than_memory_should_hold_is_read_one_by_one(
    scene: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    one = scene(10)
    monkeypatch.setattr(find_db_writer, "_FETCHED_BYTES", 8)
    one.measure()
    assert states(one.engine) == {"evaluated": 10}
    assert (len(one.read), len(one.within)) == (8, 3)
    assert one.count(KernelRow) == 11


def test_what_is_checked_is_what_is_kept_for_exports_and_archives(
    scene: Any, tmp_path: Path
) -> None:
    """The file is changed in the store as soon as it was read."""
    one = scene(3)
    files, read = one.store._files, one.store._files.read

    def read_and_change(name: str) -> bytes:
        data = read(name)
        files.write(name, b"evil")
        return data

    files.read = read_and_change
    one.measure()
    assert states(one.engine) == {"evaluated": 3}
    kept = set(read_column(one.engine, sa.select(KernelRow.blob)))
    assert kept == {b"code 0", b"code 1", b"code 2", b"text"}
    assert {read(digest) for digest in one.digests} == {b"evil"}
