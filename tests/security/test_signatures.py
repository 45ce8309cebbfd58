"""Artifacts are signed by those who hold the private key, and checked by those who hold public
keys."""

from __future__ import annotations

from pathlib import Path

import pytest

from tuna.artifacts.files import UrlFiles
from tuna.artifacts.signatures import Keys, key_id
from tuna.artifacts.store import ArtifactRefused, Artifacts

OLD, NEW = Keys.of_secret("01" * 32), Keys.of_secret("02" * 32)
DIGEST = "0" * 64


def test_a_signature_is_valid_for_its_digest_and_key_alone() -> None:
    signature = OLD.sign(DIGEST)
    (key,) = OLD.ids
    assert Keys(OLD.public).is_valid(signature, DIGEST, key)
    for bad in (b"", signature[:-1], signature + b"\0", bytes(64), NEW.sign(DIGEST)):
        assert not Keys(OLD.public).is_valid(bad, DIGEST, key)
    assert not Keys(OLD.public).is_valid(signature, "1" * 64, key)
    assert not NEW.is_valid(signature, DIGEST, key), "a key that is not accepted"
    assert Keys.of_secret("02" * 32, OLD.public).is_valid(signature, DIGEST, key)


def test_keys_are_derived_from_the_secret_as_written_down() -> None:
    """Other releases and other machines must come to the same keys."""
    assert OLD.public == ("b53defd12bdea3e9012477936a90e10c7cdc2b4eb225b27cab8867539e133b2f",)
    assert OLD.ids == (key_id(OLD.public[0]),) == ("512bb982",)


def test_who_has_public_keys_alone_cannot_sign(tmp_path: Path) -> None:
    assert "01" * 32 not in repr(OLD)
    assert "01" * 32 not in Keys(OLD.public).to_json()
    with pytest.raises(ValueError, match="only verify"):
        Keys(OLD.public).sign(DIGEST)
    files = UrlFiles((tmp_path / "store").as_uri())
    reader, owner = (
        Artifacts(files, tmp_path / "m", Keys(OLD.public)),
        Artifacts(files, tmp_path / "o", OLD),
    )
    digest = reader.put(b"code")
    for store in (reader, owner):
        with pytest.raises(ArtifactRefused):
            store.get(digest)
    assert owner.put(b"code") == digest
    assert reader.get(digest) == b"code"
    assert reader.put(b"code") == digest
    assert owner.get(digest) == b"code", (
        "a put without a signature does not remove the one that is there"
    )


@pytest.mark.parametrize(
    "text",
    ["", "[]", "null", "{}", '{"public": [], "secret": ""}', '{"public": ["00"], "secret": ""}',
     "[" * 100,
     '{"public": [1], "secret": ""}', '{"public": "00", "secret": ""}',
     '{"public": ["zz"], "secret": ""}'],
)  # fmt: skip
def test_what_is_not_keys_is_a_value_error(text: str) -> None:
    assert Keys.from_json(OLD.to_json()) == OLD
    assert Keys.from_json(Keys(OLD.public).to_json().encode()) == Keys(OLD.public)
    with pytest.raises(ValueError):  # noqa: PT011 (json's, too)
        Keys.from_json(text)


def test_an_artifact_by_a_former_key_is_taken_and_signed_again_by_the_next_put(
    tmp_path: Path,
) -> None:
    files = UrlFiles((tmp_path / "store").as_uri())
    store = Artifacts(files, tmp_path / "c", OLD)
    digest = store.put(b"code")
    store.keys = Keys.of_secret("02" * 32, OLD.public)
    assert store.get(digest) == b"code"
    store.put(b"code")
    store.keys = NEW
    assert store.get(digest) == b"code"
    store.remove([digest])
    store.keys = None
    with pytest.raises(KeyError):
        store.get(digest)


def test_copies_that_were_checked_with_other_keys_are_not_used(tmp_path: Path) -> None:
    store = Artifacts(UrlFiles(f"memory://{tmp_path.name}"), tmp_path / "c", OLD, 1 << 20)
    digest = store.put(b"code")
    assert store.get(digest) == b"code"
    store.keys = NEW
    with pytest.raises(ArtifactRefused):
        store.get(digest)
