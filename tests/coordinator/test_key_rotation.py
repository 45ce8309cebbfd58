"""`tuna key rotate`: who runs takes the new key up, what jobs need stays usable, whenever it is
interrupted or repeated."""

from __future__ import annotations

import functools
import json
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest
import redis
import sqlalchemy as sa
from jobs_builder import make_jobs
from settings_changes import change_setting

from tuna.artifacts.files import UrlFiles
from tuna.artifacts.signatures import Keys
from tuna.artifacts.store import ArtifactRefused, Artifacts
from tuna.coordinator import key_rotation
from tuna.coordinator.key_rotation import announce, replace, sign_all
from tuna.db import sessions
from tuna.db.engine import reading, writing
from tuna.db.models import Job, JobArtifact
from tuna.libraries.items import WorkItem
from tuna.queue.announcements import artifact_keys
from tuna.queue.leases import Leases
from tuna.queue.messages import Chunk
from tuna.settings import Settings, get_settings
from tuna.workers.link import RedisLink
from tuna.workers.worker_process import WorkerProcess


class Scene:
    """Three jobs that need an artifact each, in a folder."""

    def __init__(self, engine: sa.Engine, folder: Path) -> None:
        self.engine, self.settings, self.folder = engine, get_settings(), folder
        self.signed = self.refused = 0
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

    def rotate(self, *, leaked: bool = False, killed_after: int | None = None) -> None:
        """As the command does, which may be killed after some pages."""
        keys = replace(self.engine, self.settings, leaked=leaked)
        store = Artifacts(self.files, self.folder / "of the command", keys)
        for number, page in enumerate(sign_all(self.engine, store)):
            self.signed += page.signed
            self.refused += page.refused
            if number == killed_after:
                break
        self.store.refresh()

    def readable(self) -> int:
        """Of the artifacts that jobs need, with the keys that are accepted now."""
        return len([self.store.get(digest) for digest in self.digests])


@pytest.fixture
def scene(engine: sa.Engine, tuna_home: Path) -> Scene:
    return Scene(engine, tuna_home)


@pytest.mark.both_databases_in_drills
def test_the_former_key_is_accepted_until_the_next_rotation(scene: Scene) -> None:
    before, forgotten = scene.keys(), scene.store.put(b"that no job needs")
    scene.rotate()
    assert scene.keys().public[1:] == before.public
    assert (scene.signed, scene.refused) == (3, 0)
    assert scene.store.get(forgotten)
    scene.rotate()
    assert len(scene.keys().public) == 2
    assert before.public[0] not in scene.keys().public
    assert scene.readable() == 3, "signed again"
    with pytest.raises(ArtifactRefused):
        scene.store.get(forgotten)


def test_a_rotation_that_was_killed_loses_nothing_and_may_be_repeated(
    scene: Scene, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(key_rotation, "_PAGE", 1)
    scene.rotate(killed_after=0)
    assert (scene.signed, scene.readable()) == (1, 3)
    scene.rotate()
    assert (scene.signed, scene.readable()) == (4, 3)
    scene.rotate()
    assert (scene.signed, scene.refused, scene.readable()) == (7, 0, 3)


def test_rotations_at_once_come_one_after_the_other(scene: Scene) -> None:
    with ThreadPoolExecutor(4) as pool:
        made = list(
            pool.map(lambda _: replace(scene.engine, scene.settings, leaked=False), range(4))
        )
    assert len({keys.public[0] for keys in made}) == 4
    latest = next(keys for keys in made if keys.public[0] == scene.keys().public[0])
    assert scene.keys().public == latest.public[:2], "the one before it is accepted"


def test_what_a_leaked_key_signed_is_refused_at_once(scene: Scene) -> None:
    scene.rotate()
    scene.signed = 0
    scene.rotate(leaked=True)
    assert len(scene.keys().public) == 1
    assert (scene.signed, scene.refused) == (0, 3)
    for digest in scene.digests:
        with pytest.raises(ArtifactRefused):
            scene.store.get(digest)


@pytest.mark.both_databases_in_drills
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


@pytest.mark.both_databases_in_drills
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


@pytest.mark.both_databases_in_drills
def test_own_workers_get_the_secret(scene: Scene, redis_client: redis.Redis) -> None:
    keys = announce(scene.engine, redis_client, scene.settings, "n")
    assert artifact_keys(redis_client, scene.settings, "n") == keys
    assert keys.signs


@pytest.mark.both_databases_in_drills
def test_a_worker_that_runs_signs_with_the_new_key(
    engine: sa.Engine, redis_client: redis.Redis, tuna_home: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    settings = get_settings().model_copy(update={"artifacts_url": (tuna_home / "store").as_uri()})
    Artifacts.from_settings(settings).prepare()
    leases, process, ids = Leases(redis_client, "n", 30), WorkerProcess(settings), []
    process.link = RedisLink(redis_client, 30, settings)
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
        assert process.link.store(chunk).put(b"code %d" % number)
        replace(engine, settings, leaked=False)
    found = [path.suffix[1:] for path in (tuna_home / "store").rglob("*.????????")]
    assert set(found) == set(ids), "with the key of its chunk's time"


@pytest.mark.service
def test_the_command_rotates_and_shows_no_secret(engine: sa.Engine, type_in: Callable) -> None:
    assert type_in("tuna", "init-session", "noop", "-l", "r").code == 0
    first = json.loads(type_in("tuna", "key", "show", "--json").out)
    assert [one["signs"] for one in first] == [True]
    ended = type_in("tuna", "key", "rotate")
    assert ended.code == 0
    second = json.loads(type_in("tuna", "key", "show", "--json").out)
    assert second[0]["id"] in ended.out
    assert (second[1]["id"], second[1]["public"]) == (first[0]["id"], first[0]["public"])
    assert [one["signs"] for one in second] == [True, False]
    shown = type_in("tuna", "key", "show").out
    assert all(one["id"] in shown for one in second)
    assert type_in("tuna", "key", "rotate", "--leaked").code == 0
    assert len(json.loads(type_in("tuna", "key", "show", "--json").out)) == 1


def test_a_key_of_the_settings_is_not_rotated(
    type_in: Callable, monkeypatch: pytest.MonkeyPatch
) -> None:
    change_setting(monkeypatch, "TUNA_ARTIFACTS_KEY", "ab" * 32)
    ended = type_in("tuna", "key", "rotate")
    assert ended.code == 2
    assert "TUNA_ARTIFACTS_KEY is the key" in ended.err
    assert "restart" in ended.err
    (shown,) = json.loads(type_in("tuna", "key", "show", "--json").out)
    assert shown["id"] == Keys.of_secret("ab" * 32).ids[0]
