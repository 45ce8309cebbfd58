"""FlashInfer's and vLLM's own code reads what is exported: their readers are taken out of the
wheels, as in test_triton_consumers; torch is not imported."""

from __future__ import annotations

import ast
import functools
import json
import logging
import os
import sys
import threading
import types
import zipfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from test_flashinfer_files import (
    FP8,
    GEMM,
    POLICY,
    VERSIONS,
    contents,
    exported,
    ranks,  # noqa: F401  # a fixture
)
from test_state_updates import DEVICE, row, times
from test_triton_consumers import wheel  # noqa: F401  # a fixture

pytestmark = pytest.mark.drill(only=True)
TypeIn = Callable[..., Any]
Wheel = Callable[[str], zipfile.ZipFile]


class _Type:
    """A data type of PyTorch, as far as keys have its text."""

    def __init__(self, name: str) -> None:
        self._name = name

    def __repr__(self) -> str:
        return f"torch.{self._name}"


class dtype(_Type):  # noqa: N801  # the name and module by which FlashInfer knows it
    __module__ = "torch"


@pytest.fixture
def flashinfer(
    wheel: Wheel,  # noqa: F811
    monkeypatch: pytest.MonkeyPatch,
) -> types.ModuleType:
    """FlashInfer's module of the store, which imports neither torch nor the rest of it."""
    modules = {name: types.ModuleType(name) for name in _PACKAGES}
    modules["flashinfer"].__path__ = []  # type: ignore[attr-defined]
    modules["flashinfer.jit.core"].logger = logging.getLogger("flashinfer")  # type: ignore[attr-defined]
    torch = types.ModuleType("torch")
    torch.dtype = dtype  # type: ignore[attr-defined]
    for name in ("bfloat16", "float8_e4m3fn"):
        setattr(torch, name, dtype(name))
    for name, module in {**modules, "torch": torch}.items():
        monkeypatch.setitem(sys.modules, name, module)
    module = types.ModuleType("flashinfer.autotune_cache")
    module.__package__ = "flashinfer"
    monkeypatch.setitem(sys.modules, module.__name__, module)
    text = wheel("flashinfer_python").read("flashinfer/autotune_cache.py").decode()
    exec(compile(text, module.__name__, "exec"), module.__dict__)  # noqa: S102  # of a wheel
    return module


_PACKAGES = ("flashinfer", "flashinfer.jit", "flashinfer.jit.core")


def test_flashinfer_finds_each_entry_of_an_exported_store(
    flashinfer: types.ModuleType,
    type_in: TypeIn,
    ranks: Path,  # noqa: F811
) -> None:
    store = exported(type_in, ranks / "a", "flashinfer")
    reader = flashinfer.ManagedAutotuneCache(VERSIONS, root=store)
    found = reader.lookup(GEMM)
    assert (found.runner, found.tactic) == ("CutlassBf16GemmRunner", 9)
    assert found.profiling_policy == tuple(POLICY)
    assert reader.lookup(FP8).tactic == [128, [2, 1]]
    assert reader.lookup(GEMM.replace("64", "32")) is None
    entries, total, skipped = flashinfer.ManagedAutotuneCache(VERSIONS, root=store).preload()
    assert (len(entries), total, skipped) == (2, 2, 0)
    assert {str(fields) for fields, _ in entries} == {GEMM, FP8}
    other = flashinfer.ManagedAutotuneCache({**VERSIONS, "gpu": "NVIDIA H200"}, root=store)
    assert other.lookup(GEMM) is None


def test_flashinfer_writes_the_very_bytes_of_an_exported_store(
    flashinfer: types.ModuleType,
    type_in: TypeIn,
    ranks: Path,  # noqa: F811
) -> None:
    store = exported(type_in, ranks / "a", "flashinfer")
    reader = flashinfer.ManagedAutotuneCache(VERSIONS, root=store)
    writer = flashinfer.ManagedAutotuneCache(VERSIONS, root=ranks / "own")
    for fields, entry in reader.preload()[0]:
        facts = {"key_fields": fields, "profiling_policy": entry.profiling_policy}
        writer.publish(str(fields), entry.runner, entry.tactic, **facts)
    assert contents(ranks / "own") == contents(store)


def functions(text: str, wanted: set[str], names: dict[str, Any]) -> dict[str, Any]:
    """Functions and methods of a file, run with stand-ins for other names."""
    for node in ast.walk(ast.parse(text)):
        if isinstance(node, ast.FunctionDef) and node.name in wanted:
            node.decorator_list = []
            module = ast.Module([*_FUTURE, node], [])
            exec(compile(module, node.name, "exec"), names)  # noqa: S102  # of a wheel
    assert wanted <= names.keys()
    return names


_FUTURE = ast.parse("from __future__ import annotations").body


def test_flashinfer_loads_an_exported_file(
    wheel: Wheel,  # noqa: F811
    type_in: TypeIn,
    ranks: Path,  # noqa: F811
) -> None:
    file = exported(type_in, ranks / "a", "flashinfer-json")
    names: dict[str, Any] = {
        **{"json": json, "copy": __import__("copy"), "os": os, "Any": Any},
        "logger": logging.getLogger("flashinfer"),
        "_collect_metadata": lambda: VERSIONS,
    }
    text = wheel("flashinfer_python").read("flashinfer/autotuner/autotuner.py").decode()
    for node in ast.parse(text).body:
        named = isinstance(node, ast.Assign) and ast.unparse(node.targets[0])
        if named in _CONSTANTS:
            exec(compile(ast.Module([node], []), "constants", "exec"), names)  # noqa: S102
    functions(text, _LOADERS, names)
    tuner = types.SimpleNamespace(
        **{name: {} for name in _STATE},
        _lock=threading.RLock(),
        _dirty_namespaces=set(),
        _warned_cache_mismatch=set(),
    )
    tuner._observe_cache_generation = lambda *_: None
    assert names["load_configs"](tuner, str(file))
    assert tuner._file_configs == {
        GEMM: ("CutlassBf16GemmRunner", 9),
        FP8: ("CublasFp8GemmRunner", (128, (2, 1))),
    }
    assert tuner._file_config_policies[GEMM] == tuple(POLICY)
    assert tuner._file_config_selections[GEMM] == {"time_ms": 0.01}
    names["_collect_metadata"] = lambda: {**VERSIONS, "cuda_version": "12.9"}
    assert not names["load_configs"](tuner, str(file))


_CONSTANTS = {
    *("_METADATA_KEY", "_NAMESPACED_RECORDS_KEY", "_CACHE_GENERATION_KEY"),
    "_INDETERMINATE_META_VALUES",
}
_LOADERS = {
    *("load_configs", "_json_to_tactic", "_classify_metadata_mismatches"),
    "_format_meta_mismatches",
}
_STATE = (
    *("_namespaced_records", "_file_configs", "_file_config_policies"),
    "_file_config_selections",
)


class _Log:
    """vLLM's logger."""

    def __getattr__(self, name: str) -> Callable[..., None]:
        return lambda *_, **__: None


def test_vllm_takes_the_tile_of_the_nearest_batch(
    wheel: Wheel,  # noqa: F811
    type_in: TypeIn,
    tmp_path: Path,
) -> None:
    rows = [row(8, 16, 0.01), row(64, 8, 0.03), row(64, 4, 0.02)]
    assert type_in("tuna", "import-db", times(tmp_path / "a.jsonl", *rows)).code == 0
    folder = exported(type_in, tmp_path / "a", "vllm-ssu")
    place = "vllm/model_executor/layers/mamba/ops/mamba_ssm.py"
    names: dict[str, Any] = {
        **{"json": json, "os": os, "Any": Any, "functools": functools},
        **{"logger": _Log(), "_CONFIGS_DIR": str(tmp_path / "bundled")},
        "envs": types.SimpleNamespace(VLLM_TUNED_CONFIG_FOLDER=str(folder)),
        "get_device_name_as_file_name": lambda: DEVICE.replace(" ", "_"),
        "_ssm_config_override": None,
    }
    names = functions(wheel("vllm").read(place).decode(), _SSM, names)
    take = functools.partial(
        names["try_get_optimal_ssm_config"], 64, 128, nheads=1, is_blackwell=False
    )
    for dtype_name in ("float16", "bfloat16"):
        taken = [take(batch, cache_dtype=dtype_name) for batch in (1, 8, 35, 37, 4096)]
        assert taken == [(16, 1), (16, 1), (16, 1), (4, 1), (4, 1)]
    assert take(8, cache_dtype="float32") == (4, 4), "the default: there is no file"


_SSM = {
    *("get_ssm_config_file_name", "get_ssm_device_name", "_canonical_cache_dtype"),
    *("get_ssm_configs", "_get_default_ssm_launch_config", "_try_get_optimal_ssm_config_cached"),
    "try_get_optimal_ssm_config",
}


def test_no_file_that_vllm_brings_breaks_a_rule(
    wheel: Wheel,  # noqa: F811
    tmp_path: Path,
) -> None:
    from test_triton_exports import checked

    place = "vllm/model_executor/layers/mamba/ops/configs/selective_state_update/"
    archive = wheel("vllm")
    for name in archive.namelist():
        if name.startswith(place) and name.endswith(".json"):
            (tmp_path / name.removeprefix(place)).write_bytes(archive.read(name))
    found = checked(tmp_path)
    assert (len(found.files), found.entries, found.faults) == (34, 516, [])
