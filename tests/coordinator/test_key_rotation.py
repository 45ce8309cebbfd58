"""`tuna key rotate`: who runs takes the new key up, what jobs need stays usable, whenever it is
interrupted or repeated."""

from __future__ import annotations

import functools
import json
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from datetime import timedelta
from pathlib import Path
from types import SimpleNamespace

import pytest
import redis
import sqlalchemy as sa
from jobs_builder import make_jobs

from tuna.artifacts.files import UrlFiles
from tuna.artifacts.signatures import Keys
from tuna.artifacts.store import ArtifactRefused, Artifacts
from tuna.coordinator import key_rotation
from tuna.coordinator.key_rotation import Retirement, announce, replace, sign_all, sign_page
from tuna.db import sessions
from tuna.db.engine import reading, writing
from tuna.db.models import FormerKey, Job, JobArtifact
from tuna.db.types import utc_now
from tuna.libraries.items import WorkItem
from tuna.queue.announcements import artifact_keys
from tuna.queue.keys import prefix
from tuna.queue.leases import Leases
from tuna.queue.messages import Chunk
from tuna.settings import Settings, get_settings
from tuna.workers.worker_process import WorkerProcess


class Scene:
    """Three jobs that need an artifact each, in a folder."""

    def __init__(self, engine: sa.Engine, folder: Path) -> None:
        self.engine, self.settings = engine, get_settings()
        self.files = UrlFiles((folder / "store").as_uri())
        self.store = Artifacts(self.files, folder / "cache", self.keys(), newest=self.keys)
        make_jobs(engine, 3, solvers=["Noop0"])
        self.digests = sorted(self.store.put(bytes([n])) for n in range(3))
        with writing(engine) as connection:
            ids = connection.execute(sa.select(Job.id)).scalars().all()
            rows = [
                {"digest": name, "job_id": one} for name, one in zip(self.digests, ids, strict=True)
            ]
            connection.execute(sa.insert(JobArtifact), rows)

    def keys(self) -> Keys:
        with reading(self.engine) as connection:
            return sessions.artifact_keys(connection, self.settings)

    def rotate(self, *, leaked: bool = False) -> None:
        replace(self.engine, self.settings, leaked=leaked)
        self.store.refresh()

    def a_day_later(self) -> None:
        with writing(self.engine) as connection:
            connection.execute(
                sa.update(FormerKey).values(superseded_at=utc_now() - timedelta(days=1, seconds=1))
            )

    def retired(self) -> None:
        """Until a coordinator has forgotten the former keys."""
        retirement = Retirement(self.engine, self.store)
        for _ in range(10):
            retirement.tick()
        self.store.refresh()


@pytest.fixture
def scene(engine: sa.Engine, tuna_home: Path) -> Scene:
    return Scene(engine, tuna_home)


def test_what_jobs_need_is_signed_again_before_the_former_key_is_forgotten(scene: Scene) -> None:
    before, forgotten = scene.keys(), scene.store.put(b"that no job needs")
    scene.rotate()
    assert scene.keys().public[1:] == before.public
    (page,) = sign_all(scene.engine, scene.store)
    assert page[1:] == (3, 0)
    scene.retired()
    assert len(scene.keys().public) == 2, "its time is not over"
    scene.a_day_later()
    scene.retired()
    assert scene.keys().public == (scene.store.keys or before).public[:1] != before.public
    assert [scene.store.get(digest) for digest in scene.digests] == [
        scene.files.read(digest) for digest in scene.digests
    ]
    with pytest.raises(ArtifactRefused):
        scene.store.get(forgotten)


def test_a_rotation_that_was_killed_is_completed_by_a_coordinator_and_may_be_repeated(
    scene: Scene, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(key_rotation, "_PAGE", 1)
    scene.rotate()
    first = sign_page(scene.engine, scene.store)  # and killed
    assert first.last == scene.digests[0]
    retirement = Retirement(scene.engine, scene.store)
    scene.a_day_later()
    retirement.tick()
    scene.rotate()  # amid what a coordinator does with the first
    for _ in range(3):
        retirement.tick()
    scene.store.refresh()
    assert len(scene.keys().public) == 2
    assert len([scene.store.get(digest) for digest in scene.digests]) == 3
    scene.a_day_later()
    scene.retired()
    assert len(scene.keys().public) == 1
    assert len([scene.store.get(digest) for digest in scene.digests]) == 3


def test_rotations_at_once_come_one_after_the_other(scene: Scene) -> None:
    with ThreadPoolExecutor(4) as pool:
        list(pool.map(lambda _: replace(scene.engine, scene.settings, leaked=False), range(4)))
    scene.store.refresh()
    assert len(set(scene.keys().public)) == 5
    assert len([scene.store.get(digest) for digest in scene.digests]) == 3
    assert {page[1:] for page in sign_all(scene.engine, scene.store)} == {(3, 0)}


def test_what_a_leaked_key_signed_is_refused_at_once(scene: Scene) -> None:
    scene.rotate()
    scene.rotate(leaked=True)
    assert len(scene.keys().public) == 1
    for digest in scene.digests:
        with pytest.raises(ArtifactRefused):
            scene.store.get(digest)
    assert next(sign_all(scene.engine, scene.store))[1:] == (0, 3)


def test_who_still_has_the_former_key_looks_for_a_newer_one_before_it_refuses(
    scene: Scene, tmp_path: Path
) -> None:
    """One coordinator of several reads the new key up to a second after another, and after the
    workers."""
    scene_keys = scene.keys()
    replace(scene.engine, scene.settings, leaked=False)
    digest = Artifacts(scene.files, tmp_path, scene.keys()).put(b"new")
    assert scene.store.keys == scene_keys
    assert scene.store.get(digest) == b"new"
    with pytest.raises(ArtifactRefused):
        Artifacts(scene.files, tmp_path, scene_keys).get(digest)


def test_a_coordinator_never_replaces_a_newer_key_by_the_one_that_it_read_before(
    scene: Scene, redis_client: redis.Redis, monkeypatch: pytest.MonkeyPatch
) -> None:
    tell = functools.partial(announce, scene.engine, redis_client, scene.settings, "n")
    tell()
    read = sessions.artifact_keys

    def rotated_meanwhile(connection: sa.Connection, settings: Settings) -> Keys:
        monkeypatch.setattr(key_rotation.sessions, "artifact_keys", read)
        found = read(connection, settings)
        scene.rotate()
        tell()
        return found

    monkeypatch.setattr(key_rotation.sessions, "artifact_keys", rotated_meanwhile)
    tell()
    assert artifact_keys(redis_client, scene.settings, "n") == scene.keys()


def test_own_workers_get_the_secret_and_members_public_keys_alone(
    scene: Scene, redis_client: redis.Redis, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(key_rotation, "members", lambda _: [SimpleNamespace(name="m:1")])
    keys = announce(scene.engine, redis_client, scene.settings, "n")
    assert artifact_keys(redis_client, scene.settings, "n") == keys
    joined = scene.settings.model_copy(update={"namespace": "n", "worker_name": "m:1"})
    assert artifact_keys(redis_client, joined, "n") == keys.verifier
    name = f"{prefix('n', 'm:1')}public"
    assert keys.secret not in redis_client.get(name).decode()
    assert 0 < redis_client.ttl(name) <= 600, (
        "one that is revoked at this moment leaves nothing for ever"
    )


def test_a_worker_that_runs_signs_with_the_new_key(
    engine: sa.Engine, redis_client: redis.Redis, tuna_home: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(WorkerProcess, "_client", redis_client)
    settings = get_settings().model_copy(update={"artifacts_url": (tuna_home / "store").as_uri()})
    Artifacts.from_settings(settings).prepare()
    leases, process, ids = Leases(redis_client, "n", 30), WorkerProcess(settings), []
    for number in range(2):
        ids.append(announce(engine, redis_client, settings, "n").ids[0])
        item = WorkItem(
            job_id=number,
            attempt=1,
            session_id=1,
            library="noop",
            step="build",
            solver="Noop1",
            config={},
        )
        facts = {
            "namespace": "n",
            "library": "noop",
            "step": "build",
            "environment": "",
            "toolchain": "noop-1",
        }
        leases.open([str(number)])
        chunk = Chunk(id=str(number), items=(item,), **facts)
        assert process.run_chunk(chunk.model_dump_json()) == "finished"
        assert process._store("n", settings.artifacts_url).put(b"code %d" % number)
        replace(engine, settings, leaked=False)
    found = [path.suffix[1:] for path in (tuna_home / "store").rglob("*.????????")]
    assert set(found) == set(ids), "with the key of its chunk's time"


@pytest.mark.service
def test_the_command_rotates_and_shows_no_secret(engine: sa.Engine, type_in: Callable) -> None:
    assert type_in("tuna", "init-session", "noop", "-l", "r").code == 0
    first = json.loads(type_in("tuna", "key", "show", "--json").out)
    assert [one["accepted_until"] for one in first] == [None]
    ended = type_in("tuna", "key", "rotate")
    assert ended.code == 0
    second = json.loads(type_in("tuna", "key", "show", "--json").out)
    assert second[0]["id"] in ended.out
    assert (second[1]["id"], second[1]["public"]) == (first[0]["id"], first[0]["public"])
    assert second[1]["accepted_until"] is not None
    shown = type_in("tuna", "key", "show").out
    assert all(one["id"] in shown for one in second)
    assert type_in("tuna", "key", "rotate", "--leaked").code == 0
    assert len(json.loads(type_in("tuna", "key", "show", "--json").out)) == 1


def test_a_key_of_the_settings_is_not_rotated(
    type_in: Callable, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("TUNA_ARTIFACTS_KEY", "ab" * 32)
    get_settings.cache_clear()
    ended = type_in("tuna", "key", "rotate")
    assert ended.code == 2
    assert "TUNA_ARTIFACTS_KEY is the key" in ended.err
    assert "restart" in ended.err
    (shown,) = json.loads(type_in("tuna", "key", "show", "--json").out)
    assert shown["id"] == Keys.of_secret("ab" * 32).ids[0]
