"""The contract of `ArtifactStore` as a pytest class.

A subclass gives `store`, `elsewhere` (the same store as another process on another machine has it),
how to damage and remove its entries, and a full store.
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor

import pytest

from tuna.errors import StorageFull
from tuna.libraries.context import ArtifactStore

_NO_DIGESTS = (
    "",
    "..",
    "0" * 63,
    "0" * 65,
    "A" * 64,
    "g" * 64,
    "../" * 21 + "x",
    "0" * 63 + "\n",
    "0" * 63 + "/",
    "0" * 64 + ".build",
)


#: Build key, from which others are made
_KEY = "5a" * 32


class StoreContract:
    """A stored blob is found by its hash, or there is none."""

    @pytest.fixture
    def store(self) -> ArtifactStore:
        """An empty store."""
        raise NotImplementedError("a subclass says which store it tests")

    @pytest.fixture
    def elsewhere(self) -> ArtifactStore:
        """`store` as another process has it, without what `store` may have cached."""
        raise NotImplementedError("a subclass says how another process has the store")

    @pytest.fixture
    def overwrite(self) -> Callable[[str, bytes | None], None]:
        """`overwrite(digest, data)` changes what is kept under `digest` behind the store's back;
        None removes it."""
        raise NotImplementedError("a subclass says how its bytes are damaged")

    @pytest.fixture
    def full(self) -> ArtifactStore:
        """A full store."""
        raise NotImplementedError("a subclass says how its store is filled")

    @pytest.mark.parametrize(
        "data",
        [b"", b"code", b"\r\n\0\xff", bytes(range(256)) * 4096],
        ids=["empty", "text", "bytes", "1 MiB"],
    )
    def test_what_is_put_is_had_by_its_hash(self, store: ArtifactStore, data: bytes) -> None:
        """Whatever bytes they are."""
        digest = store.put(data)
        assert digest == hashlib.sha256(data).hexdigest()
        assert store.get(digest) == data

    def test_what_one_member_put_another_gets(
        self, store: ArtifactStore, elsewhere: ArtifactStore
    ) -> None:
        """Each process gets the blobs of the other."""
        digest = store.put(b"code")
        assert elsewhere.get(digest) == b"code"
        assert store.get(elsewhere.put(b"other code")) == b"other code"

    def test_the_same_bytes_are_one_artifact(
        self, store: ArtifactStore, elsewhere: ArtifactStore
    ) -> None:
        """However often they are put."""
        assert len({store.put(b"code"), store.put(b"code"), elsewhere.put(b"code")}) == 1
        assert store.put(b"other") != store.put(b"code")

    def test_many_may_put_the_same_at_once(self, store: ArtifactStore) -> None:
        """Half-written bytes are never handed out."""
        data = b"x" * 500_000
        with ThreadPoolExecutor(8) as pool:
            digests = set(pool.map(lambda _: store.put(data), range(16)))
            assert digests == {hashlib.sha256(data).hexdigest()}
            assert set(pool.map(store.get, list(digests) * 16)) == {data}

    def test_what_is_not_there_is_a_key_error(self, store: ArtifactStore) -> None:
        """A missing blob is an error, not an empty answer."""
        store.put(b"code")
        with pytest.raises(KeyError):
            store.get(hashlib.sha256(b"other").hexdigest())

    @pytest.mark.parametrize("name", _NO_DIGESTS, ids=range(len(_NO_DIGESTS)))
    def test_a_name_that_is_no_digest_is_a_key_error(self, store: ArtifactStore, name: str) -> None:
        """It names no file either."""
        with pytest.raises(KeyError):
            store.get(name)

    @pytest.mark.parametrize(
        "damage", [b"evil", b"", b"cod", None], ids=["other", "empty", "cut", "gone"]
    )
    def test_what_is_damaged_is_gone_until_it_is_put_again(
        self,
        store: ArtifactStore,
        elsewhere: ArtifactStore,
        overwrite: Callable[[str, bytes | None], None],
        damage: bytes | None,
    ) -> None:
        """The step that made it is done again, and what it puts is good."""
        digest = store.put(b"code")
        overwrite(digest, damage)
        for take in (store.get, elsewhere.get):
            with pytest.raises(KeyError):
                take(digest)
        assert store.put(b"code") == digest
        assert store.get(digest) == elsewhere.get(digest) == b"code"

    def test_a_build_is_found_by_its_key(
        self, store: ArtifactStore, elsewhere: ArtifactStore
    ) -> None:
        """In each process; the last one that was recorded counts."""
        assert store.find_build(_KEY) is None
        store.record_build(_KEY, store.put(b"code"))
        assert store.find_build(_KEY) == elsewhere.find_build(_KEY) == b"code"
        elsewhere.record_build(_KEY, elsewhere.put(b"other"))
        assert store.find_build(_KEY) == elsewhere.find_build(_KEY) == b"other"
        assert store.find_build(_KEY[::-1]) is None

    @pytest.mark.parametrize("damage", [b"evil", None], ids=["other", "gone"])
    def test_a_build_whose_artifact_is_damaged_is_gone_until_it_is_put_again(
        self,
        store: ArtifactStore,
        elsewhere: ArtifactStore,
        overwrite: Callable[[str, bytes | None], None],
        damage: bytes | None,
    ) -> None:
        """It is built once more."""
        digest = store.put(b"code")
        store.record_build(_KEY, digest)
        overwrite(digest, damage)
        assert store.find_build(_KEY) is elsewhere.find_build(_KEY) is None
        store.record_build(_KEY, store.put(b"code"))
        assert elsewhere.find_build(_KEY) == b"code"

    @pytest.mark.parametrize("name", _NO_DIGESTS, ids=range(len(_NO_DIGESTS)))
    def test_a_build_key_that_is_no_hash_is_a_key_error(
        self, store: ArtifactStore, name: str
    ) -> None:
        """It names no file either."""
        digest = store.put(b"code")
        with pytest.raises(KeyError):
            store.record_build(name, digest)
        with pytest.raises(KeyError):
            store.find_build(name)

    def test_a_full_store_says_so_and_keeps_nothing_of_it(self, full: ArtifactStore) -> None:
        """A worker then returns its chunk."""
        data = b"more" * 50_000
        with pytest.raises(StorageFull):
            full.put(data)
        with pytest.raises(KeyError):
            full.get(hashlib.sha256(data).hexdigest())
