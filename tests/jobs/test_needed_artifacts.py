"""Artifacts are shared by content: their bytes live while any job that has not ended needs them, in
a store that expires."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
import redis
import sqlalchemy as sa
from jobs_builder import claim, finished, make_jobs, states
from queries import execute, read_value
from structlog.testing import capture_logs

from tuna.artifacts.files import RedisFiles
from tuna.artifacts.store import Artifacts
from tuna.coordinator import actions as job_actions
from tuna.coordinator import staging
from tuna.coordinator.drain import Drain
from tuna.db import access_tokens, networks
from tuna.db.engine import reading, writing
from tuna.db.models import CacheEntryRow, Job, JobArtifact
from tuna.jobs import needed_artifacts
from tuna.jobs.failures import release
from tuna.jobs.needed_artifacts import ArtifactUser
from tuna.libraries.items import CodeObject, Rival, Trial, WorkItem, result_of
from tuna.libraries.registry import get_library
from tuna.plugins import Plugins
from tuna.queue.claim import ClaimedChunk
from tuna.queue.results import ResultStream
from tuna.vocabulary import Cause
from tuna_models.manifest import Manifest
from tuna_models.work import store

LIBRARY = get_library("noop")
#: More than a released artifact may still live, and less than any other does.
LONG_S = 1000


class Scene:
    """Two jobs of two steps in which `run` puts results, with artifacts in Redis."""

    def __init__(self, engine: sa.Engine, client: redis.Redis, folder: Path) -> None:
        self.engine, self.client = engine, client
        self.store = Artifacts(RedisFiles(client, "n", 1 << 20), folder)
        self.drain = Drain(engine, ResultStream(client, "results", "me"), self.store, 3)
        self.session_id = make_jobs(engine, 1, solvers=["Noop0", "Noop1"])

    def claim(self, step: str, limit: int = 10) -> list[ClaimedChunk]:
        return claim(self.engine, self.session_id, step, limit)

    def report(self, chunks: Sequence[ClaimedChunk], **facts: object) -> None:
        for chunk in chunks:
            results = (result_of(item, **{"ok": True, **facts}) for item in chunk.items)
            self.drain.write([finished(chunk.id, results)])

    def built(self, *refers_to: str) -> str:
        """All jobs through their first step, with the same artifact, which refers to others;
        returns it."""
        digest = self.store.put(b"code")
        code = tuple(CodeObject(artifact=other) for other in refers_to)
        self.report(
            self.claim("build"), trials=(Trial(index=0, params="p", artifact=digest),), kernels=code
        )
        return digest

    def measured(self, limit: int = 10, **facts: object) -> None:
        trial = Trial(index=0, time_ms=1.5, times_ms=(1.5,))
        self.report(self.claim("measure", limit), **{"trials": (trial,), **facts})

    def lives_long(self, digest: str) -> bool:
        return int(self.client.ttl(f"tuna:{{n}}:artifact:{digest}")) > LONG_S

    def needs(self) -> int:
        return read_value(self.engine, sa.select(sa.func.count()).select_from(JobArtifact))


@pytest.fixture()
def scene(engine: sa.Engine, redis_client: redis.Redis, tmp_path: Path) -> Scene:
    return Scene(engine, redis_client, tmp_path)


@pytest.mark.both_databases_in_drills
def test_the_end_of_one_job_does_not_shorten_the_life_of_what_another_needs(scene: Scene) -> None:
    digest = scene.built()
    scene.measured(limit=1)
    assert states(scene.engine) == {"evaluated": 1, "compiled": 1}
    assert scene.lives_long(digest)
    scene.measured()
    assert states(scene.engine) == {"evaluated": 2}
    assert not scene.lives_long(digest)
    assert scene.needs() == 0


@pytest.mark.both_databases_in_drills
def test_what_an_artifact_refers_to_lives_as_long(scene: Scene) -> None:
    inner = scene.store.put(b"inner code")
    scene.built(inner)
    scene.measured(limit=1, kernels=(CodeObject(artifact=inner),))
    assert scene.lives_long(inner)
    scene.measured(kernels=(CodeObject(artifact=inner),))
    assert not scene.lives_long(inner)


@pytest.mark.both_databases_in_drills
def test_the_text_of_a_problem_lives_until_its_last_job_has_ended(scene: Scene) -> None:
    text = scene.store.put(b"workload")
    scene.report(scene.claim("build"), workload=text)
    scene.measured(limit=1)
    assert scene.lives_long(text)
    scene.measured()
    assert not scene.lives_long(text)


@pytest.mark.both_databases_in_drills
def test_a_job_that_waits_for_days_keeps_its_code(scene: Scene) -> None:
    """Also where another job's end shortened its life before the result that needs it was
    drained."""
    digest, gone = scene.built(), scene.store.put(b"nobody's")
    for name in (digest, gone):
        _expires_soon(scene, name)
    needed_artifacts.keep(scene.engine, scene.store)
    assert scene.lives_long(digest)
    assert (
        scene.client.zscore("tuna:{n}:artifacts", digest) > (scene.client.time()[0] + LONG_S) * 1000
    )
    assert not scene.lives_long(gone)


@pytest.mark.both_databases_in_drills
def test_the_files_of_an_imported_model_live_as_long_as_the_model(scene: Scene) -> None:
    """They expired after a day, and no build of the model was possible any more."""
    file, text = scene.store.put(b"a model"), scene.store.put(b"its module")
    facts: dict[str, Any] = {
        "size_bytes": 7,
        "opset": "17",
        "shapes": {},
        "target": "{}",
        "tvm": "",
        "inputs": (),
    }
    manifest = Manifest(file=file, text=text, tasks=(), **facts)
    with writing(scene.engine) as connection:
        store.save(connection, "net", manifest, {})
        networks.add_model(connection, networks.Named("by hand", "1"))
    for name in (file, text):
        _expires_soon(scene, name)
    needed_artifacts.keep(scene.engine, scene.store)
    assert scene.lives_long(file)
    assert scene.lives_long(text)


def _add_row_of_a_package(engine: sa.Engine, digest: str) -> None:
    with writing(engine) as connection:
        access_tokens.add(connection, "a" * 12, "x", "submit", 60.0, space="team")
        names = {"space": "team", "key": "k", "file": "f"}
        row = {**names, "digest": digest, "size_bytes": 1, "token_id": "a" * 12}
        connection.execute(sa.insert(CacheEntryRow).values(row))


def _expires_soon(scene: Scene, digest: str) -> None:
    scene.client.expire(f"tuna:{{n}}:artifact:{digest}", 60)
    scene.client.zadd("tuna:{n}:artifacts", {digest: (scene.client.time()[0] + 60) * 1000})


def test_nothing_is_removed_while_rows_of_a_package_cannot_be_read(
    scene: Scene, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(needed_artifacts, "USERS", Plugins("tuna.nothing", "user", ArtifactUser))
    named, other = scene.store.put(b"an entry's"), scene.store.put(b"another")
    with reading(scene.engine) as connection:
        assert needed_artifacts.in_use(connection, {named, other}) == set(), "no rows yet"
    _add_row_of_a_package(scene.engine, named)
    for digest in (named, other):
        _expires_soon(scene, digest)
    with capture_logs() as logged, reading(scene.engine) as connection:
        assert needed_artifacts.in_use(connection, {named, other}) == {named, other}
    assert [(one["log_level"], one["tables"]) for one in logged] == [("warning", ["cache_entry"])]
    needed_artifacts.keep(scene.engine, scene.store)
    assert scene.lives_long(named)
    assert scene.lives_long(other)


@pytest.mark.both_databases_in_drills
def test_what_a_package_reads_of_its_rows_is_not_removed(
    scene: Scene, monkeypatch: pytest.MonkeyPatch
) -> None:
    named, other = scene.store.put(b"an entry's"), scene.store.put(b"another")
    users = Plugins("tuna.nothing", "user", ArtifactUser)
    monkeypatch.setattr(needed_artifacts, "USERS", users)
    _add_row_of_a_package(scene.engine, named)
    for digest in (named, other):
        _expires_soon(scene, digest)
    with users.adding("cache_entry", ArtifactUser(lambda _, among: {named} & (among or {named}))):
        with reading(scene.engine) as connection:
            assert needed_artifacts.in_use(connection, {named, other}) == {named}
        needed_artifacts.keep(scene.engine, scene.store)
    assert scene.lives_long(named)
    assert not scene.lives_long(other)


@pytest.mark.both_databases_in_drills
def test_artifacts_that_are_gone_are_not_made_up_again(scene: Scene) -> None:
    digest = scene.built()
    scene.client.delete(f"tuna:{{n}}:artifact:{digest}", "tuna:{n}:artifacts")
    needed_artifacts.keep(scene.engine, scene.store)
    assert scene.client.zcard("tuna:{n}:artifacts") == 0


def test_canceled_jobs_and_those_that_killed_their_workers_need_nothing(scene: Scene) -> None:
    digest = scene.built()
    lost = scene.claim("measure", limit=1)
    with writing(scene.engine) as connection:
        release(connection, [chunk.id for chunk in lost], max_attempts=1, worker_lost=True)
    needed_artifacts.keep(scene.engine, scene.store)
    assert scene.lives_long(digest), "the other job needs it"
    job_actions.cancel(scene.engine, LIBRARY, job_actions.JobSelection(scene.session_id))
    assert states(scene.engine) == {"errored": 1, "canceled": 1}
    needed_artifacts.keep(scene.engine, scene.store)
    assert not scene.lives_long(digest)
    assert scene.needs() == 0


def test_a_failed_attempt_that_is_repeated_keeps_its_code(scene: Scene) -> None:
    digest = scene.built()
    scene.measured(trials=(), ok=False, cause=Cause.RUN_ERROR)
    assert states(scene.engine) == {"compiled": 2}
    assert scene.lives_long(digest)
    execute(scene.engine, sa.update(Job).values(failures=2, ready_at=None))
    scene.measured(trials=(), ok=False, cause=Cause.RUN_ERROR)
    assert states(scene.engine) == {"errored": 2}
    assert not scene.lives_long(digest)


def test_what_the_finals_need_lives_until_their_end(scene: Scene) -> None:
    """Their jobs did not build it: their rivals' jobs did, and have ended."""
    digest = scene.built()
    scene.measured()
    chunk = scene.claim  # any job stands for the finals
    with writing(scene.engine) as connection:
        job_id = connection.execute(sa.select(sa.func.min(Job.id))).scalar_one()
        connection.execute(
            sa.update(Job).where(Job.id == job_id).values(state="compiled", step="measure")
        )
    item: WorkItem = chunk("measure")[0].items[0]
    rival = Rival(
        index=1, solver="Noop0", seed=0, number=0, params="p", artifact=digest, time_ms=1.0
    )
    assert not scene.lives_long(digest)
    assert (
        staging.stage_artifacts(
            scene.engine, scene.store, [item.model_copy(update={"rivals": (rival,)})]
        )
        == 0
    )
    assert scene.lives_long(digest)
    assert scene.needs() == 1
