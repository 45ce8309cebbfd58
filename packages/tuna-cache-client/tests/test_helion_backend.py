"""Best configs that one process found, in another one: Helion's own remote cache with our backend.

Needs the packages `helion` and `torch`. Not run, because it needs a GPU: the key of a kernel, which
these tests give, and the search.
"""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
from space_double import SpaceDouble

pytest.importorskip("helion", reason="needs the packages `helion` and `torch`")

import helion
from helion.autotuner import remote_cache
from helion.autotuner.base_cache import LooseAutotuneCacheKey
from helion.autotuner.local_cache import parse_cache_entry


@pytest.fixture(autouse=True)
def backend(in_space: SpaceDouble, monkeypatch: pytest.MonkeyPatch, tmp_path: Any) -> Any:
    """Helion's settings, and the backend that it loads by them."""
    monkeypatch.setenv("HELION_REMOTE_CACHE_BACKEND", "tuna_cache_client.helion.Backend")
    monkeypatch.setenv("HELION_CACHE_DIR", str(tmp_path / "helion"))
    return remote_cache._load_remote_backend()


def _cache(source: str) -> remote_cache.RemoteAutotuneCache:
    """Helion's cache for a kernel, without what asks the GPU."""
    cache = remote_cache.RemoteAutotuneCache.__new__(remote_cache.RemoteAutotuneCache)
    cache.key = LooseAutotuneCacheKey(
        specialization_key=((128,),),
        extra_results=(),
        kernel_source_hash=source,
        hardware="AMD Instinct MI300X",
        runtime_name="7.0",
        backend="triton",
    )
    cache._backend = remote_cache._load_remote_backend()
    generation = SimpleNamespace(flatten=lambda config: list(config.config.values()))
    cache.kernel = SimpleNamespace(
        config_spec=SimpleNamespace(create_config_generation=lambda **_: generation),
        backend_cache_key=lambda config: "key",
    )
    cache.autotuner = SimpleNamespace(settings=SimpleNamespace(autotune_search_acf=None))
    return cache


def test_a_config_of_one_process_is_found_by_another(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Any, capsys: pytest.CaptureFixture[str]
) -> None:
    best = helion.Config(block_sizes=[64, 32], num_warps=8)
    assert _cache("a").get() is None
    _cache("a").put(best)
    monkeypatch.setenv("HELION_CACHE_DIR", str(tmp_path / "another machine"))
    assert _cache("a").get() == best
    assert _cache("b").get() is None
    assert [path.suffix for path in (tmp_path / "another machine").iterdir()] == [".best_config"]
    assert capsys.readouterr().err == ""


def test_entries_are_listed_with_the_newest_first(backend: Any) -> None:
    configs = [helion.Config(block_sizes=[2**n]) for n in range(4)]
    for number, config in enumerate(configs):
        _cache(str(number)).put(config)
    found = [parse_cache_entry(text).config for text in backend.list(max_results=3)]
    assert found == configs[:0:-1]
    assert len(list(backend.list())) == 4


@pytest.mark.parametrize("text", ["", "{", "[]", '{"config": "7"}', '{"config": "{"}'])
def test_what_helion_cannot_parse_is_a_miss(in_space: SpaceDouble, backend: Any, text: str) -> None:
    key = _cache("a").key.stable_hash()
    in_space.files[key, key + ".best_config"] = text.encode()
    assert _cache("a").get() is None
    assert list(backend.list()) == []


def test_a_server_that_fails_is_no_fault_of_the_program(
    in_space: SpaceDouble, backend: Any, capsys: pytest.CaptureFixture[str]
) -> None:
    in_space.fault = "500"
    best = helion.Config(block_sizes=[64], num_warps=8)
    _cache("a").put(best)
    assert _cache("a").get() == best, "in its own folder"
    assert list(backend.list()) == []
    assert capsys.readouterr().err.count("500") == 1
