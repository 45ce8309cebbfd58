"""Artifacts with signatures, in a folder and in Redis, and Redis as their store."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest
import redis
import sqlalchemy as sa
from fsspec.implementations.local import LocalFileSystem
from redis.backoff import NoBackoff
from redis.retry import Retry
from settings_changes import change_setting

from tuna.artifacts.files import Files, RedisFiles, UrlFiles
from tuna.artifacts.signatures import Keys
from tuna.artifacts.store import ArtifactRefused, Artifacts, store_url
from tuna.db import sessions
from tuna.db.engine import reading
from tuna.errors import BadInput, StorageFull, StoreUnavailable
from tuna.libraries.items import WorkItem
from tuna.queue.announcements import signer_key, store_name, with_store
from tuna.queue.leases import Leases
from tuna.queue.messages import Chunk
from tuna.settings import Settings, get_settings
from tuna.workers.link import RedisLink
from tuna.workers.worker_process import WorkerProcess

KEY, OTHER = Keys.of_secret("6b" * 32), Keys.of_secret("6f" * 32)


@pytest.fixture(params=["folder", "redis"])
def files(request: pytest.FixtureRequest, tmp_path: Path) -> Files:
    if request.param == "folder":
        return UrlFiles((tmp_path / "store").as_uri())
    return RedisFiles(request.getfixturevalue("redis_client"), "n", 1 << 20, wait_s=0.1)


def test_what_a_member_stored_another_gets(files: Files, tmp_path: Path) -> None:
    digest = Artifacts(files, tmp_path / "one", KEY).put(b"code")
    other = Artifacts(files, tmp_path / "two", KEY)
    assert other.get(digest) == b"code"


def test_without_a_key_nothing_is_signed_and_nothing_refused(files: Files, tmp_path: Path) -> None:
    unsigned = Artifacts(files, tmp_path)
    digest = unsigned.put(b"code")
    assert unsigned.get(digest) == b"code"
    assert (
        Artifacts(files, tmp_path).get(Artifacts(files, tmp_path, KEY).put(b"signed")) == b"signed"
    )


def test_what_no_member_signed_is_refused_until_a_member_makes_it(
    files: Files, tmp_path: Path
) -> None:
    digest = Artifacts(files, tmp_path).put(b"code")
    Artifacts(files, tmp_path, OTHER).put(b"code")
    member = Artifacts(files, tmp_path, KEY)
    with pytest.raises(ArtifactRefused, match="signature") as error:
        member.get(digest)
    assert digest in str(error.value)
    assert member.put(b"code") == digest
    assert member.get(digest) == b"code"


def test_what_is_refused_while_another_thread_takes_the_new_keys_is_verified_with_them(
    tmp_path: Path,
) -> None:
    """Of the artifacts that a coordinator read at the same time just after a rotation, some were
    lost."""

    class OfTwoThreads(UrlFiles):
        def read(self, name: str) -> bytes:
            if name.endswith(KEY.ids[0]):
                store.refresh()  # the other one does
            return super().read(name)

    files = OfTwoThreads((tmp_path / "store").as_uri())
    digest = Artifacts(files, tmp_path, OTHER).put(b"code")
    store = Artifacts(files, tmp_path, KEY, newest=lambda: OTHER)
    assert store.get(digest) == b"code"


def test_a_changed_signature_and_changed_bytes_are_refused_and_mended_by_the_next_put(
    files: Files, tmp_path: Path
) -> None:
    member = Artifacts(files, tmp_path, KEY)
    digest = member.put(b"code")
    suffix = f".{KEY.ids[0]}"
    other = member.put(b"other code")
    for name, data in (
        (digest + suffix, b"0" * 64),
        (digest + suffix, b""),
        (digest + suffix, files.read(other + suffix)),
        (digest, b"evil"),
    ):
        files.write(name, data)
        with pytest.raises(KeyError):
            member.get(digest)
        member.put(b"code")
        assert member.get(digest) == b"code"


BUILD = "5a" * 32


@pytest.fixture
def member(files: Files, tmp_path: Path) -> Artifacts:
    """A signer that has recorded two builds."""
    made = Artifacts(files, tmp_path / "member", KEY)
    made.record_build(BUILD, made.put(b"code"))
    made.record_build(BUILD[::-1], made.put(b"other code"))
    assert made.find_build(BUILD) == b"code"
    return made


def forged(files: Files) -> list[bytes]:
    """Entries by someone who may write to the store and has no secret."""
    digest, key_id, signature = files.read(f"{BUILD}.build").decode().split(" ")
    (evil,) = [Artifacts(files, Path("nowhere")).put(b"evil")]
    other = files.read(f"{BUILD[::-1]}.build")
    third = OTHER.ids[0], OTHER.sign(f"{BUILD} {digest}").hex()
    of_digest = KEY.ids[0], files.read(f"{digest}.{KEY.ids[0]}").hex()
    return [
        other,  # of another key, as it is
        f"{other.decode().split(' ')[0]} {key_id} {signature}".encode(),
        f"{evil} {key_id} {signature}".encode(),
        " ".join([digest, *third]).encode(),
        " ".join([digest, *of_digest]).encode(),  # the signature of the bytes alone
        f"{digest} {key_id} ".encode(),
        f"{digest} {key_id} {signature}00".encode(),
        f"{digest} no-key {signature}".encode(),
        f"../{digest} {key_id} {signature}".encode(),
        digest.encode(),
        b"",
        b"\xff\xfe",
    ]


def test_a_forged_build_is_none_and_the_next_build_mends_it(
    files: Files, member: Artifacts
) -> None:
    for entry in forged(files):
        files.write(f"{BUILD}.build", entry)
        assert member.find_build(BUILD) is None, entry
    member.record_build(BUILD, member.put(b"code"))
    assert member.find_build(BUILD) == b"code"


def test_a_build_of_an_artifact_that_nobody_signed_is_none(files: Files, member: Artifacts) -> None:
    evil = Artifacts(files, Path("nowhere")).put(b"evil")
    signature = KEY.sign(f"{BUILD} {evil}").hex()
    files.write(f"{BUILD}.build", f"{evil} {KEY.ids[0]} {signature}".encode())
    assert member.find_build(BUILD) is None


def test_builds_are_recorded_by_signers_alone_and_found_by_all(
    files: Files, member: Artifacts, tmp_path: Path
) -> None:
    verifier = Artifacts(files, tmp_path / "verifier", Keys(KEY.public))
    verifier.record_build(BUILD, verifier.put(b"its own"))
    assert verifier.find_build(BUILD) == member.find_build(BUILD) == b"code"


def test_a_build_is_found_as_long_as_its_signer_is_accepted(
    files: Files, member: Artifacts, tmp_path: Path
) -> None:
    rotated = Artifacts(files, tmp_path / "rotated", Keys.of_secret("6f" * 32, KEY.public))
    assert rotated.find_build(BUILD) == b"code"
    leaked = Artifacts(files, tmp_path / "leaked", OTHER)
    assert leaked.find_build(BUILD) is None
    leaked.record_build(BUILD, leaked.put(b"code"))
    assert (leaked.find_build(BUILD), member.find_build(BUILD)) == (b"code", None)


def test_a_build_goes_with_its_artifact(tmp_path: Path) -> None:
    folder = tmp_path / "store"
    store = Artifacts(folder.as_uri(), tmp_path, KEY)
    one, two = store.put(b"code"), store.put(b"other code")
    store.record_build(BUILD, one)
    store.record_build(BUILD[::-1], two)
    store.remove([one])
    assert (store.find_build(BUILD), store.find_build(BUILD[::-1])) == (None, b"other code")
    (folder / "notes").write_bytes(b"")
    store._files.write(f"{two}.built", b"../../notes")  # by someone else
    store.remove([two])
    assert (folder / "notes").exists()
    store._files.write(f"{two}.built", BUILD[::-1].encode())
    store.remove([two])
    (folder / "notes").unlink()
    assert [path for path in folder.rglob("*") if path.is_file()] == []


def test_builds_in_redis_count_and_expire_as_artifacts_do(
    redis_client: redis.Redis, tmp_path: Path
) -> None:
    store = Artifacts(RedisFiles(redis_client, "n", 1000, wait_s=0.1), tmp_path)
    digest = store.put(b"code")
    store.record_build(BUILD, digest)
    entry = f"tuna:{{n}}:artifact:{BUILD}.build"
    length = redis_client.strlen(entry)
    assert redis_client.get("tuna:{n}:artifact_bytes") == b"%d" % (len(b"code") + length)
    assert 900 < redis_client.ttl(entry) <= 86400
    redis_client.delete(f"tuna:{{n}}:artifact:{digest}")  # as if it had expired
    assert store.find_build(BUILD) is None
    store.record_build(BUILD, store.put(b"code"))
    assert store.find_build(BUILD) == b"code"
    store.put(b"x" * (1000 - len(b"code") - length))
    with pytest.raises(StorageFull):
        store.record_build(BUILD[::-1], digest)


def test_what_is_not_there_is_a_key_error_and_not_a_refusal(files: Files, tmp_path: Path) -> None:
    for digest in ("0" * 64, "../../etc/passwd", ""):
        with pytest.raises(KeyError) as error:
            Artifacts(files, tmp_path, KEY).get(digest)
        assert not isinstance(error.value, ArtifactRefused)


def test_redis_holds_no_more_than_its_bound_and_makes_room_again(
    redis_client: redis.Redis, tmp_path: Path, eventually: Callable[..., None]
) -> None:
    files = RedisFiles(redis_client, "n", 1000, wait_s=0.1)
    store = Artifacts(files, tmp_path)
    first, second = store.put(b"a" * 400), store.put(b"b" * 400)
    store.put(b"a" * 400)  # again: takes no more room
    with pytest.raises(StorageFull, match="bound"):
        store.put(b"c" * 400)
    with pytest.raises(StorageFull):
        store.put(b"d" * 2000)
    assert store.get(second) == b"b" * 400
    store.release([first])
    assert 0 < redis_client.ttl(f"tuna:{{n}}:artifact:{first}") <= 900
    redis_client.zadd("tuna:{n}:artifacts", {first: 1})  # as if that time were over
    redis_client.delete(f"tuna:{{n}}:artifact:{first}")
    third = store.put(b"c" * 400)
    assert store.get(third) == b"c" * 400
    with pytest.raises(KeyError):
        store.get(first)
    assert redis_client.get("tuna:{n}:artifact_bytes") == b"800"


def test_a_full_redis_is_storage_full(redis_client: redis.Redis, tmp_path: Path) -> None:
    used = int(redis_client.info("memory")["used_memory"])
    redis_client.config_set("maxmemory", used + 100_000)
    try:
        with pytest.raises(StorageFull):
            Artifacts(RedisFiles(redis_client, "n", 1 << 30, wait_s=0.1), tmp_path).put(
                b"x" * 1_000_000
            )
    finally:
        redis_client.config_set("maxmemory", 0)


def test_the_settings_choose_the_store(tuna_home: Path, redis_client: redis.Redis) -> None:
    def files(**settings: str) -> object:
        return Artifacts.from_settings(Settings(home=tuna_home, **settings))._files

    assert isinstance(files(), UrlFiles)
    assert isinstance(files(broker_url="redis://h/0"), RedisFiles)
    assert isinstance(files(broker_url="amqp://h", redis_url="rediss://h/0"), RedisFiles)
    assert isinstance(files(broker_url="redis://h/0", artifacts_url="memory://x"), UrlFiles)


def test_a_worker_without_settings_of_its_own_takes_the_coordinators_store(
    tuna_home: Path, redis_client: redis.Redis
) -> None:
    bare = Settings(home=tuna_home, broker_url="redis://h/0")
    with pytest.raises(StoreUnavailable, match="No coordinator has published"):
        with_store(redis_client, bare, "n")
    redis_client.set(store_name("n"), "s3://bucket/there")
    assert with_store(redis_client, bare, "n").artifacts_url == "s3://bucket/there"
    redis_client.set(store_name("n"), "")
    assert store_url(with_store(redis_client, bare, "n")) == "", "in Redis"
    for told in (
        Settings(home=tuna_home, artifacts_url="memory://x"),
        Settings(home=tuna_home, artifacts_key="ab" * 32),
    ):
        assert with_store(redis_client, told, "other") is told


def test_the_key_of_the_settings_wins_and_must_be_long_and_hexadecimal(
    engine: sa.Engine, tuna_home: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with reading(engine) as connection:
        told = sessions.artifact_keys(
            connection, Settings(home=tuna_home, artifacts_key=KEY.secret)
        )
        assert told == KEY != sessions.artifact_keys(connection, Settings(home=tuna_home))
    for value in ("secret words", "abcd"):
        change_setting(monkeypatch, "TUNA_ARTIFACTS_KEY", value)
        with pytest.raises(BadInput, match="TUNA_ARTIFACTS_KEY") as error:
            get_settings()
        assert value not in str(error.value)


def test_a_folder_that_no_coordinator_prepared_is_not_the_store(tmp_path: Path) -> None:
    store = Artifacts((tmp_path / "mounted").as_uri(), tmp_path)
    with pytest.raises(StoreUnavailable, match="does not exist or is empty") as error:
        store.check()
    assert "mounted" in (error.value.hint or "")
    for _ in range(2):
        store.prepare()
        store.check()
    assert len(list((tmp_path / "mounted").iterdir())) == 1


def test_a_store_that_does_not_answer_is_not_one_that_lost_its_files(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    store = Artifacts(tmp_path.as_uri(), tmp_path)
    digest = store.put(b"code")
    (tmp_path / digest[:2] / digest).unlink()
    with pytest.raises(KeyError):
        store.get(digest)

    def stale(*_: object, **__: object) -> None:
        raise OSError(116, "Stale file handle")

    monkeypatch.setattr("tuna.artifacts.files.read_plain", stale)
    for call in ("exists", "pipe_file"):
        monkeypatch.setattr(LocalFileSystem, call, stale)
    for ask in (lambda: store.get(digest), store.check, lambda: store.put(b"other")):
        with pytest.raises(StoreUnavailable, match="Stale file handle"):
            ask()


def test_a_redis_that_is_away_is_a_store_that_is_away(tmp_path: Path) -> None:
    client: redis.Redis = redis.Redis(unix_socket_path="/nowhere", retry=Retry(NoBackoff(), 0))
    store = Artifacts(RedisFiles(client, "n", 1000), tmp_path)
    for ask in (lambda: store.get("0" * 64), lambda: store.put(b"code")):
        with pytest.raises(StoreUnavailable):
            ask()


def test_a_worker_that_finds_no_key_builds_nothing_that_others_would_refuse(
    redis_client: redis.Redis, tuna_home: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """After a wipe of Redis a new worker kept on without a key, and what it built was refused as
    `artifact_lost` for ever."""
    monkeypatch.setattr("tuna.workers.runner._BACKOFF_S", 0.0)
    settings = get_settings().model_copy(update={"artifacts_url": (tuna_home / "store").as_uri()})
    Artifacts.from_settings(settings).prepare()
    item = WorkItem(
        job_id=1, attempt=1, session_id=1, library="noop", step="build", solver="Noop1", config={}
    )
    facts = {
        "namespace": "n",
        "library": "noop",
        "step": "build",
        "environment": "",
        "toolchain": "noop-1",
    }
    leases, process, ends = Leases(redis_client, "n", 30), WorkerProcess(settings), []
    process.link = RedisLink(redis_client, 30, settings)
    for number in ("1", "2"):
        leases.open([number])
        ends.append(process.run_chunk(Chunk(id=number, items=(item,), **facts).model_dump_json()))
        redis_client.set(signer_key("n"), KEY.to_json())
    assert ends == ["refused", "finished"]
