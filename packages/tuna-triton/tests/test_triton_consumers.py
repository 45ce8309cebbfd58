"""Folders of tiles read back by the consumers' own functions, which are taken out of their wheels.

The wheels are not in the repository: TUNA_TEST_CONSUMERS names a folder with them, else pip fetches
them (340 and 40 MB). Nothing of the packages is imported, and neither is torch: a function runs
with stand-ins for the few names that it reads.
"""

from __future__ import annotations

import ast
import functools
import itertools
import json
import os
import subprocess
import sys
import types
import zipfile
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import pytest
from test_triton_exports import PRODUCT, TUNED, checked, export, results

from tuna.configs import Config, GemmConfig
from tuna_triton.exporters import (
    BlockFp8Exporter,
    SglangMoeExporter,
    VllmMoeExporter,
)
from tuna_triton.kernel_arguments import BLOCK_FP8, MOE
from tuna_triton.moe import MoeConfig
from tuna_triton.tiles import TARGETS, Tile
from tuna_triton.tuned_files import GRID, nearest_key

pytestmark = pytest.mark.drill(only=True)

VERSIONS = {"vllm": "0.33.0", "sglang": "0.5.23"}
_VLLM, _SGLANG = "vllm/model_executor/layers/", "sglang/srt/layers/moe/moe_runner/triton_utils/"
#: Files of the readers, and the functions of each.
FILES = {
    ("vllm", "moe"): (
        _VLLM + "fused_moe/fused_moe.py",
        *("get_config_file_name", "get_moe_configs", "get_default_config"),
        "try_get_optimal_moe_config",
    ),
    ("vllm", "gemm"): (
        _VLLM + "quantization/utils/fp8_utils.py",
        *("get_w8a8_block_fp8_configs", "w8a8_triton_block_scaled_mm"),
    ),
    ("sglang", "moe"): (
        _SGLANG + "fused_moe_triton_config.py",
        *("get_config_file_name", "get_moe_configs", "get_default_config"),
        "try_get_optimal_moe_config",
    ),
    ("sglang", "gemm"): (
        "sglang/kernels/ops/gemm/fp8_kernel.py",
        *("get_w8a8_block_fp8_configs", "prepare_block_fp8_matmul_inputs"),
        *("select_w8a8_block_fp8_matmul_kernel", "w8a8_block_fp8_matmul_triton"),
    ),
}
#: Folders of tiles that the packages bring.
SHIPPED = {
    "vllm": (_VLLM + "fused_moe/configs/", _VLLM + "quantization/utils/configs/"),
    "sglang": (_SGLANG + "configs/", "sglang/kernels/ops/gemm/configs/"),
}
DEVICE = "NVIDIA H100 80GB HBM3"  #: that of the results in test_triton_exports
TRITON = "3.6.0"  #: likewise


@pytest.fixture(scope="module")
def wheel(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], zipfile.ZipFile]:
    """`wheel("vllm")`: the package's wheel; skips where it cannot be had."""
    given = os.environ.get("TUNA_TEST_CONSUMERS")
    folder = Path(given) if given else tmp_path_factory.mktemp("wheels")

    @functools.cache
    def found(package: str) -> zipfile.ZipFile:
        wanted = f"{package}=={VERSIONS[package]}"
        pattern = f"{package}-{VERSIONS[package]}-*.whl"
        if not given:
            words = ["download", "--quiet", "--no-deps", "--only-binary=:all:", wanted]
            done = subprocess.run(
                [sys.executable, "-m", "pip", *words, "-d", folder],
                capture_output=True,
                text=True,
                check=False,
            )
            if done.returncode:
                pytest.skip(f"{wanted} cannot be fetched: {done.stderr.splitlines()[-1:]}")
        files = sorted(folder.glob(pattern))
        if not files:
            pytest.skip(f"there is no {pattern} in {folder}")
        return zipfile.ZipFile(files[0])

    return found


class Reader:
    """The functions of one consumer's file, beside a folder and on a device."""

    def __init__(
        self, wheel: zipfile.ZipFile, consumer: str, kind: str, folder: Path, amd: bool = False
    ) -> None:
        path, *self._wanted = FILES[consumer, kind]
        self.launched: dict[str, Any] = {}
        self.warnings: list[str] = []
        self.folder = folder
        names = _stand_ins(self, amd)
        text = wheel.read(path).decode()
        for node in ast.parse(text).body:
            if isinstance(node, ast.FunctionDef) and node.name in self._wanted:
                code = f"from __future__ import annotations\n{ast.get_source_segment(text, node)}"
                exec(code, names)  # noqa: S102  # of a wheel, in a drill
        self.names = names
        assert set(self._wanted) <= names.keys()

    def __getattr__(self, name: str) -> Any:
        return self.names[name]

    def product(self, config: GemmConfig) -> Tile:
        """The tile with which the consumer launches a product."""
        (launch,) = self._wanted[-1:]
        block = [128, 128]
        a, b = Tensor(config.m, config.k), Tensor(config.n, config.k)
        scales = Tensor(config.m, -(-config.k // 128)), Tensor(*(-(-one // 128) for one in b.shape))
        self.names[launch](a, b, *scales, block)
        return {name: value for name, value in self.launched.items() if name != "needs_masking"}

    def experts(self, layer: MoeConfig, **more: Any) -> Any:
        """The tile that the consumer takes for a mixture of experts."""
        sizes = layer.experts, layer.intermediate, layer.hidden
        block = [layer.block_n, layer.block_k] if layer.block_n else None
        return self.try_get_optimal_moe_config(
            (sizes[0], 2 * sizes[1], sizes[2]),
            (sizes[0], sizes[2], sizes[1]),
            layer.topk,
            layer.scheme or None,
            layer.tokens,
            block_shape=block,
            **more,
        )


class Tensor:
    """A packed matrix without values, as far as a launch asks for it."""

    dtype, device = "float", "cuda"

    def __init__(self, *shape: int) -> None:
        self.shape, self.ndim = shape, len(shape)

    def numel(self) -> int:
        return self.shape[0] * self.shape[1]

    def stride(self, axis: int) -> int:
        return (self.shape[1], 1)[axis]

    def is_contiguous(self) -> bool:
        return True

    def new_empty(self, shape: Sequence[int], dtype: str) -> Tensor:
        return Tensor(*shape)


@dataclass
class Kernel:
    """A kernel whose launches are noted."""

    reader: Reader
    name: str

    def __getitem__(self, grid: object) -> Callable[..., None]:
        return self._launch

    def _launch(self, *_: Any, **options: Any) -> None:
        self.reader.launched.clear()
        self.reader.launched.update(options)


def _stand_ins(reader: Reader, amd: bool) -> dict[str, Any]:
    """What the consumers' files import, as they are on a GPU without special settings."""
    space = types.SimpleNamespace
    log = space(
        **dict.fromkeys(("info", "info_once"), lambda *_, **__: None),
        **dict.fromkeys(
            ("warning", "warning_once"), lambda text, *_, **__: reader.warnings.append(text)
        ),
    )
    platform = space(is_rocm=lambda: amd, is_sm90=not amd)
    triton = space(__version__=TRITON, cdiv=lambda a, b: -(-a // b))
    torch = space(
        **{"float": "float", "float16": "float16", "int": "int", "float8_e8m0fnu": "e8m0"},
        _dynamo=space(is_compiling=lambda: False),
    )
    deterministic = space(enable_deterministic_inference=False)
    kernels = (
        "_w8a8_triton_block_scaled_mm",
        *("_w8a8_block_fp8_matmul", "_w8a8_block_fp8_matmul_hopper"),
    )
    return {
        **{"os": os, "json": json, "functools": functools, "logger": log, "torch": torch},
        **{"triton": triton, "lru_cache": functools.lru_cache},
        "__file__": str(reader.folder / "reader.py"),
        "envs": space(VLLM_BATCH_INVARIANT=False, VLLM_TUNED_CONFIG_FOLDER=str(reader.folder)),
        "current_platform": platform,
        "get_platform": lambda: platform,
        "get_device_name": lambda: DEVICE,
        "get_device_name_as_file_name": lambda: DEVICE.replace(" ", "_"),
        "get_exec": lambda: space(deterministic=deterministic),
        "log_info_on_rank0": lambda *_: None,
        "_is_hip": amd,
        "_is_cuda": not amd,
        "_is_gfx1250": False,
        "_use_low_smem_fp8_default": lambda: False,
        **{name: Kernel(reader, name) for name in kernels},
    }


@pytest.fixture(autouse=True)
def no_override(monkeypatch: pytest.MonkeyPatch) -> None:
    """The modules from which the readers import while they run."""
    for name in (
        "vllm.model_executor.layers.fused_moe",
        "sglang.srt.layers.moe.moe_runner.triton_utils",
    ):
        module = types.ModuleType(name)
        monkeypatch.setattr(module, "get_config", lambda: None, raising=False)
        monkeypatch.setitem(sys.modules, name, module)


BLOCKED = MoeConfig(1, 512, 128, 2048, 10, scheme="fp8_w8a8", block_n=128, block_k=128)
LAYERS = [
    BLOCKED,
    MoeConfig(1, 8, 7168, 4096, 2),
    MoeConfig(1, 16, 1024, 5120, 1, scheme="fp8_w8a8"),
    MoeConfig(1, 64, 1408, 2048, 6, scheme="int8_w8a16"),
]
TUNED_AT = (1, 64, 512)
BATCHES = (*range(1, 1300), *range(1300, 9000, 7))


def in_full(tile: Tile) -> Tile:
    """A tile as the kernel is launched with it: with Triton's own defaults on NVIDIA's GPUs, and
    without what the launch sets itself."""
    whole = {"num_warps": 4, "num_stages": 3, **tile}
    return {name: value for name, value in whole.items() if name != "SPLIT_K"}


def at(config: Config, batch: int) -> Config:
    assert isinstance(config, MoeConfig | GemmConfig)
    name = "tokens" if isinstance(config, MoeConfig) else "m"
    return replace(config, **{name: batch})


def samples(solver: str, config: Config) -> list[Any]:
    """Results of three batch sizes, of which the second does not gain."""
    gains = dict(zip(TUNED_AT, (1.2, 1.01, 1.5), strict=True))
    found = (results(solver, at(config, m), 1.0, gain) for m, gain in gains.items())
    return list(itertools.chain.from_iterable(found))


def expected(written: Mapping[int, Tile], own: Callable[[int], Tile], batch: int) -> Tile:
    """The tuned tile near the batches that gained, else the consumer's own default there."""
    key = nearest_key(GRID, batch)
    return written[key] if key in (1, 512) else own(key)


@pytest.mark.parametrize("config", LAYERS, ids=range(len(LAYERS)))
def test_vllm_takes_the_written_tile_for_every_batch_of_experts(
    wheel: Callable[[str], zipfile.ZipFile], tmp_path: Path, config: MoeConfig
) -> None:
    folder = export(tmp_path, VllmMoeExporter(), samples("VllmMoe", config))
    reader = Reader(wheel("vllm"), "vllm", "moe", folder)
    without = Reader(wheel("vllm"), "vllm", "moe", tmp_path / "none")
    written = _tuned(folder)
    for batch in BATCHES:
        wanted = expected(written, lambda key: without.experts(at(config, key)), batch)
        assert in_full(reader.experts(at(config, batch))) == in_full(wanted), batch
    assert reader.warnings == []
    assert "Using default MoE config" in without.warnings[0]


@pytest.mark.parametrize("config", LAYERS, ids=range(len(LAYERS)))
def test_sglang_takes_the_written_pair_for_every_batch_of_experts(
    wheel: Callable[[str], zipfile.ZipFile],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    config: MoeConfig,
) -> None:
    folder = export(tmp_path, SglangMoeExporter(), samples("SglangMoe", config))
    (tmp_path / "none" / "configs").mkdir(parents=True)
    monkeypatch.delenv("SGLANG_MOE_CONFIG_DIR", raising=False)
    without = Reader(wheel("sglang"), "sglang", "moe", tmp_path / "none")
    own = {key: without.experts(at(config, key)) for key in GRID}
    assert without.warnings
    monkeypatch.setenv("SGLANG_MOE_CONFIG_DIR", str(folder))
    reader = Reader(wheel("sglang"), "sglang", "moe", tmp_path / "none")
    written = _tuned(folder / "configs" / f"triton_{TRITON.replace('.', '_')}")
    for batch in BATCHES:
        up, (down, _) = reader.experts(at(config, batch), return_down_config=True)
        wanted = expected(written, own.__getitem__, batch)
        assert in_full(up) == in_full(down) == in_full(wanted), batch
    assert reader.warnings == []


@pytest.mark.parametrize(("consumer", "solver"), [("vllm", "Vllm"), ("sglang", "Sglang")])
def test_both_take_the_written_tile_for_every_batch_of_a_product(
    wheel: Callable[[str], zipfile.ZipFile], tmp_path: Path, consumer: str, solver: str
) -> None:
    """One folder with the files of both, copied to where each has its own."""
    both = [*samples("VllmBlockFp8", PRODUCT), *samples("SglangBlockFp8", PRODUCT)]
    folder = export(tmp_path, BlockFp8Exporter(), both)
    beside = tmp_path / "package"
    beside.mkdir()
    folder.rename(beside / "configs")
    reader = Reader(wheel(consumer), consumer, "gemm", beside)
    without = Reader(wheel(consumer), consumer, "gemm", tmp_path / "none")
    pattern = "*[[]128,128].json" if consumer == "vllm" else "*[[]128, 128].json"
    written = _tuned(beside / "configs", pattern)
    for batch in BATCHES:
        wanted = expected(written, lambda key: dict(without.product(at(PRODUCT, key))), batch)
        assert in_full(reader.product(at(PRODUCT, batch))) == in_full(wanted), batch
    assert reader.warnings == []
    assert "Using default" in without.warnings[0]


def _tuned(folder: Path, pattern: str = "E=*.json") -> dict[int, Tile]:
    """The tiles of the first file, of which those that gained are the tuned ones."""
    file = min(folder.glob(pattern))
    content = json.loads(file.read_text())
    tiles = {int(key): tile for key, tile in content.items() if key != "triton_version"}
    for key in (1, 512):
        assert {**tiles[key], "GROUP_SIZE_M": 0} == {**TUNED, "GROUP_SIZE_M": 0}
    return tiles


@pytest.mark.parametrize("config", LAYERS, ids=range(len(LAYERS)))
def test_the_default_on_amd_is_vllms_own(
    wheel: Callable[[str], zipfile.ZipFile], tmp_path: Path, config: MoeConfig
) -> None:
    reader = Reader(wheel("vllm"), "vllm", "moe", tmp_path, amd=True)
    own = {"waves_per_eu": 0, "matrix_instr_nonkdim": 0, "kpack": 1}
    for batch in GRID:
        layer = at(config, batch)
        found = MOE.default(layer, TARGETS["gfx942"], "vllm")
        assert found == {**in_full(reader.experts(layer)), **own}


def test_the_default_of_products_on_amd_is_vllms_own(
    wheel: Callable[[str], zipfile.ZipFile], tmp_path: Path
) -> None:
    reader = Reader(wheel("vllm"), "vllm", "gemm", tmp_path)
    default = BLOCK_FP8.default(PRODUCT, TARGETS["gfx942"], "vllm")
    assert {name: default[name] for name in reader.product(PRODUCT)} == reader.product(PRODUCT)


#: Rules that files of the packages break, with the number of files. Each was read beside the code:
#: `scale` is 256 columns for a block of 128, which SGLang does not clip (`fused_moe_kernel` takes
#: one scale for a tile); `shared` was compiled, and needs 262,144 and 147,456 bytes; `name` is a
#: spelling (bf16, float8) or a type (int8_w8a8) that vLLM 0.33 does not ask for.
BROKEN: dict[str, Sequence[Mapping[str, int]]] = {
    "vllm": ({"clipped": 54, "grid": 17, "name": 9}, {"grid": 53, "name": 39}),
    "sglang": ({"grid": 35, "scale": 1, "shared": 5}, {"grid": 35}),
}


@pytest.mark.parametrize("package", VERSIONS)
def test_defects_of_shipped_folders_are_found(
    wheel: Callable[[str], zipfile.ZipFile], tmp_path: Path, package: str
) -> None:
    archive = wheel(package)
    for number, (place, rules) in enumerate(zip(SHIPPED[package], BROKEN[package], strict=True)):
        names = [one for one in archive.namelist() if one.startswith(place)]
        archive.extractall(tmp_path / str(number), names)
        found = checked(tmp_path / str(number) / place)
        files = {(one.rule, one.file) for one in found.faults}
        counted = {rule: sum(one == rule for one, _ in files) for rule, _ in files}
        assert counted == rules
