"""The copies of artifacts that workers keep are bounded, and never used in place of what was asked
for."""

from __future__ import annotations

import hashlib
import os
from pathlib import Path

import pytest

from tuna.artifacts.copies import ArtifactCache
from tuna.artifacts.files import UrlFiles
from tuna.artifacts.signatures import Keys
from tuna.artifacts.store import Artifacts
from tuna.settings import Settings


def _name(data: bytes) -> str:
    return hashlib.sha256(data).hexdigest()


def _size(folder: Path) -> int:
    return sum(path.stat().st_size for path in folder.rglob("*") if path.is_file())


def test_the_least_recently_used_go_first(tmp_path: Path) -> None:
    """The cache of a worker is bounded: 50 jobs once left 400 files."""
    cache, blobs = (
        ArtifactCache(tmp_path / "cache" / "key", 100_000),
        [bytes([n]) * 10_000 for n in range(30)],
    )
    for number, blob in enumerate(blobs):
        cache.put(_name(blob), blob)
        os.utime(tmp_path / "cache" / "key" / _name(blob), (number, number))
        assert _size(tmp_path) <= 100_000
        if number:
            assert cache.get(_name(blobs[0])) == blobs[0], "used again and again"
    kept = [number for number, blob in enumerate(blobs) if cache.get(_name(blob))]
    assert (kept[0], kept[-1]) == (0, 29)
    assert kept[1:] == list(range(kept[1], 30))
    assert len(kept) >= 8


def test_copies_of_all_processes_and_keys_count_together(tmp_path: Path) -> None:
    caches = [ArtifactCache(tmp_path / "cache" / key, 100_000) for key in "ab"]
    (tmp_path / "cache").mkdir()
    (tmp_path / "cache" / "notes.txt").write_bytes(bytes(1000))
    # of a process that was killed
    (tmp_path / "cache" / f"{'0' * 32}.tmp").write_bytes(bytes(90_000))
    os.utime(tmp_path / "cache" / f"{'0' * 32}.tmp", (1, 1))
    for number in range(40):
        blob = bytes([number]) * 9_000
        caches[number % 2].put(_name(blob), blob)
    assert _size(tmp_path) <= 101_000
    assert (tmp_path / "cache" / "notes.txt").exists()


def test_what_does_not_fit_is_not_kept_and_does_no_harm(tmp_path: Path) -> None:
    (tmp_path / "file").write_bytes(b"")
    for cache in (
        ArtifactCache(tmp_path / "small" / "k", 100),
        ArtifactCache(tmp_path / "none" / "k", 0),
    ):
        cache.put(_name(b"x" * 50), b"x" * 50)
        assert cache.get(_name(b"x" * 50)) is None
    unwritable = ArtifactCache(tmp_path / "file" / "k", 1 << 20)
    unwritable.put(_name(b"x"), b"x")
    assert unwritable.get(_name(b"x")) is None


@pytest.mark.parametrize("bound", [1 << 20, 0])
def test_a_store_elsewhere_is_asked_once(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, bound: int
) -> None:
    files, asked = UrlFiles(f"memory://{tmp_path.name}"), list[str]()
    read = files.read
    monkeypatch.setattr(files, "read", lambda name: asked.append(name) or read(name))
    store = Artifacts(files, tmp_path, Keys.of_secret("6b" * 32), bound)
    digest = store.put(b"code")
    asked.clear()
    assert [store.get(digest) for _ in range(3)] == 3 * [b"code"]
    assert len(asked) == (2 if bound else 6), "the bytes and their signature"
    other = Artifacts(files, tmp_path, Keys.of_secret("6f" * 32), bound)
    with pytest.raises(KeyError, match="signature"):
        other.get(digest)


def test_a_folder_of_this_machine_is_read_as_it_is(tmp_path: Path) -> None:
    store = Artifacts((tmp_path / "store").as_uri(), tmp_path / "cache", cache_bytes=1 << 20)
    assert store.get(store.put(b"code")) == b"code"
    assert not (tmp_path / "cache").exists()


def test_workers_keep_copies_within_the_setting_and_coordinators_keep_none(tmp_path: Path) -> None:
    settings = Settings(
        home=tmp_path, artifacts_url=f"memory://{tmp_path.name}-settings", cache_mib=1
    )
    coordinator, worker = (
        Artifacts.from_settings(settings, cached=cached) for cached in (False, True)
    )
    digest = coordinator.put(b"code")
    assert coordinator.get(digest) == b"code"
    assert not (tmp_path / "cache").exists()
    assert worker.get(digest) == b"code"
    assert _size(tmp_path / "cache" / "artifacts") == 4
