"""The artifact store: no path traversal, and bytes that do not match their digest are refused."""

from __future__ import annotations

import hashlib
import os
from pathlib import Path

import pytest

from tuna.artifacts.store import Artifacts
from tuna.vocabulary import MAX_BYTES


@pytest.fixture(params=["file", "memory"])
def store(request: pytest.FixtureRequest, tmp_path: Path) -> Artifacts:
    """A local and a remote store."""
    url = (tmp_path / "a").as_uri() if request.param == "file" else f"memory://{tmp_path.name}"
    return Artifacts(url, tmp_path / "cache", cache_bytes=1 << 20)


@pytest.mark.parametrize(
    "name",
    ["", "..", "../" * 21 + "x", "/etc/passwd", "A" * 64, "0" * 63 + "/", "0" * 63 + "\0",
     "0" * 63 + "\n", "0" * 65,
     "٠" * 64, "file:///etc/passwd", "http://127.0.0.1/" + "0" * 47],
    ids=range(12),
)  # fmt: skip
def test_a_name_that_is_no_digest_names_nothing(
    store: Artifacts, name: str, tmp_path: Path
) -> None:
    with pytest.raises(KeyError):
        store.get(name)
    assert not (tmp_path / "cache").exists()


def test_bytes_that_were_changed_are_not_handed_out(tmp_path: Path) -> None:
    store = Artifacts((tmp_path / "a").as_uri(), tmp_path / "cache")
    digest = store.put(b"code")
    (tmp_path / "a" / digest[:2] / digest).write_bytes(b"evil")
    with pytest.raises(KeyError):
        store.get(digest)


def test_a_copy_that_was_changed_is_made_again(tmp_path: Path) -> None:
    store = Artifacts("memory://copies", tmp_path / "cache", cache_bytes=1 << 20)
    digest = store.put(b"code")
    assert store.get(digest) == b"code"
    (copy,) = (tmp_path / "cache").rglob(digest)
    copy.write_bytes(b"evil")
    assert store.get(digest) == b"code"
    assert copy.read_bytes() == b"code"


def test_a_huge_artifact_is_not_read(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    store = Artifacts((tmp_path / "a").as_uri(), tmp_path / "cache")
    digest = hashlib.sha256(b"").hexdigest()
    place = tmp_path / "a" / digest[:2] / digest
    place.parent.mkdir(parents=True)
    with open(place, "wb") as stream:
        stream.truncate(MAX_BYTES + 1)
    with pytest.raises(KeyError):
        store.get(digest)


def test_what_others_put_into_a_shared_folder_is_no_artifact_and_blocks_nobody(
    tmp_path: Path,
) -> None:
    store = Artifacts((tmp_path / "a").as_uri(), tmp_path / "cache")
    digest = store.put(b"code")
    place = tmp_path / "a" / digest[:2] / digest
    (tmp_path / "elsewhere").write_bytes(b"code")
    for plant in (
        lambda: place.symlink_to("/dev/zero"), lambda: os.mkfifo(place), place.mkdir,
        lambda: place.symlink_to(tmp_path / "elsewhere"), lambda: place.symlink_to(place),
    ):  # fmt: skip
        place.unlink()
        plant()
        with pytest.raises(KeyError):
            store.get(digest)
        if place.is_dir():
            place.rmdir()
        assert store.put(b"code") == digest
        assert store.get(digest) == b"code"


def test_the_password_of_a_store_is_not_shown(tmp_path: Path) -> None:
    from tuna.errors import ServiceError

    for url in (
        "nosuch://me:hunter2@host/store",
        "sftp://me:hunter2@127.0.0.1:9/store",
        "s3://me:hunter2@x/y?z=hunter2",
    ):
        with pytest.raises(ServiceError) as caught:
            Artifacts(url, tmp_path)
        assert "hunter2" not in str(caught.value)
