"""Builds that were made before."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from tuna_models.work import files
from tuna_models.work.files import BuildCache, key_of


def test_a_build_is_found_by_all_that_went_into_it(tmp_path: Path) -> None:
    cache, library = BuildCache(tmp_path / "cache"), tmp_path / "made.so"
    library.write_bytes(b"code")
    key = key_of({"model": "a", "winograd": True})
    assert cache.find(key, tmp_path / "out.so") is None
    cache.keep(key, library, {"answer": 42})
    assert cache.find(key, tmp_path / "out.so") == {"answer": 42}
    assert (tmp_path / "out.so").read_bytes() == b"code"
    assert key == key_of({"winograd": True, "model": "a"})
    assert key != key_of({"model": "a", "winograd": False})


def test_a_build_depends_on_the_code_of_each_package_that_makes_it(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    packages, keys = files._CODE, {key_of({})}
    for name in packages:
        monkeypatch.setattr(files, "_CODE", [one for one in packages if one != name])
        keys.add(key_of({}))
    assert len(keys) == 1 + len(packages)


def test_the_oldest_builds_are_forgotten_and_a_damaged_one_is_made_again(tmp_path: Path) -> None:
    cache, library = BuildCache(tmp_path / "cache"), tmp_path / "made.so"
    library.write_bytes(b"code")
    for number in range(files._KEPT + 1):
        cache.keep(f"key{number}", library, {})
        os.utime(tmp_path / "cache" / f"key{number}.json", (number, number))
        if number == 1:
            # used, so that it is not the oldest
            assert cache.find("key0", tmp_path / "out.so") == {}
    assert cache.find("key0", tmp_path / "out.so") == {}
    (tmp_path / "cache" / "key2.so").write_bytes(b"evil")
    assert cache.find("key2", tmp_path / "out.so") is None, "it is not what was checked"
    assert cache.find("key1", tmp_path / "out.so") is None
    assert not (tmp_path / "cache" / "key1.so").exists()
    (tmp_path / "cache" / "key0.json").write_text("{")
    assert cache.find("key0", tmp_path / "out.so") is None
