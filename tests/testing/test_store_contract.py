"""Every store of artifacts keeps the contract: a folder, a file system that is not here, Redis;
signed and not."""

from __future__ import annotations

import errno
import hashlib
from collections.abc import Callable
from pathlib import Path
from typing import Any

import fsspec
import pytest
import redis

from tuna.artifacts.files import Files, RedisFiles, UrlFiles
from tuna.artifacts.signatures import Keys
from tuna.artifacts.store import Artifacts
from tuna.errors import StorageFull
from tuna.testing.store_contract import StoreContract

Overwrite = Callable[[str, bytes | None], None]
KEY = Keys.of_secret("6b" * 32)


def _no_space(*_: object, **__: object) -> None:
    raise OSError(errno.ENOSPC, "No space left on device")


class _OurStore(StoreContract):
    key: Keys | None = None

    @pytest.fixture
    def files(self) -> Files:
        raise NotImplementedError

    @pytest.fixture
    def store(self, files: Files, tmp_path: Path) -> Artifacts:
        return Artifacts(files, tmp_path / "here", self.key)

    @pytest.fixture
    def elsewhere(self, files: Files, tmp_path: Path) -> Artifacts:
        return Artifacts(files, tmp_path / "there", self.key)


class _UrlStore(_OurStore):
    @pytest.fixture
    def url(self, tmp_path: Path) -> str:
        return (tmp_path / "store").as_uri()

    @pytest.fixture
    def files(self, url: str) -> Files:
        return UrlFiles(url)

    @pytest.fixture
    def overwrite(self, url: str) -> Overwrite:
        system, root = fsspec.core.url_to_fs(url)

        def change(digest: str, data: bytes | None) -> None:
            place = f"{root}/{digest[:2]}/{digest}"
            if data is None:
                system.rm_file(place)
            else:
                system.pipe_file(place, data)

        return change

    @pytest.fixture
    def full(self, store: Artifacts, url: str, monkeypatch: pytest.MonkeyPatch) -> Artifacts:
        system, _ = fsspec.core.url_to_fs(url)

        def write_some(place: str, data: bytes, **_: Any) -> None:
            with system.open(place, "wb") as stream:
                stream.write(data[:100])
            _no_space()

        monkeypatch.setattr(system, "pipe_file", write_some)
        return store


class TestFolder(_UrlStore):
    pass


class TestSignedFolder(_UrlStore):
    key = KEY


class TestMemory(_UrlStore):
    @pytest.fixture
    def url(self, tmp_path: Path) -> str:
        return f"memory://{tmp_path.name}"


class TestRedis(_OurStore):
    @pytest.fixture
    def files(self, redis_client: redis.Redis) -> Files:
        return RedisFiles(redis_client, "n", 16 << 20, wait_s=0.1)

    @pytest.fixture
    def overwrite(self, redis_client: redis.Redis) -> Overwrite:
        def change(digest: str, data: bytes | None) -> None:
            if data is None:
                assert redis_client.delete(f"tuna:{{n}}:artifact:{digest}") == 1
            else:
                redis_client.set(f"tuna:{{n}}:artifact:{digest}", data)

        return change

    @pytest.fixture
    def full(self, redis_client: redis.Redis, tmp_path: Path) -> Artifacts:
        store = Artifacts(
            RedisFiles(redis_client, "n", 1000, wait_s=0.05), tmp_path / "full", self.key
        )
        store.put(b"x" * (1000 - (64 if self.key else 0)))
        return store


class TestSignedRedis(TestRedis):
    key = KEY


class _Trusting:
    """A store that believes what it reads, and takes half of what does not fit."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder

    def put(self, data: bytes) -> str:
        digest = hashlib.sha256(data).hexdigest()
        self.path(digest).write_bytes(data[:100_000])
        if len(data) > 100_000:
            raise StorageFull("There is no room.")
        return digest

    def get(self, digest: str) -> bytes:
        return self.path(digest).read_bytes()

    def path(self, digest: str) -> Path:
        return self._folder / digest


def test_a_store_that_does_not_look_at_what_it_reads_fails(tmp_path: Path) -> None:
    suite, store = StoreContract(), _Trusting(tmp_path)
    with pytest.raises(pytest.fail.Exception):
        suite.test_what_is_damaged_is_gone_until_it_is_put_again(
            store,
            store,
            lambda digest, data: (tmp_path / digest).write_bytes(data or b"") and None,
            b"evil",
        )
    with pytest.raises(pytest.fail.Exception):
        suite.test_a_full_store_says_so_and_keeps_nothing_of_it(store)
    with pytest.raises(FileNotFoundError):
        suite.test_what_is_not_there_is_a_key_error(store)
