"""Folders of tile sizes: written, read as their consumers read them, and checked."""

from __future__ import annotations

import json
import re
from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from tuna.configs import Config, GemmConfig
from tuna.configs.moe import MoeConfig
from tuna.configs.triton_kernel import TritonKernelConfig
from tuna.configs.values import DataType
from tuna.exports.database_files import check
from tuna.libraries.exporter import CheckFacts, Entry, Exporter, Findings
from tuna.libraries.results import ResultEnvironment
from tuna.libraries.triton.exporters import (
    BlockFp8Exporter,
    SglangMoeExporter,
    TunedExporter,
    VllmMoeExporter,
    WinnersExporter,
)
from tuna.libraries.triton.kernel_arguments import BLOCK_FP8, MOE
from tuna.libraries.triton.tiles import AXES, TARGETS, Tile, tile_text
from tuna.libraries.triton.tuned_files import GRID, PROVENANCE, parse_name, read_tiles
from tuna.testing.exporter_contract import (
    ExporterContract,
    SampleResult,
    SampleSource,
    sample_record,
)

LAYER = MoeConfig(1, 512, 128, 2048, 10, scheme="fp8_w8a8", block_n=128, block_k=128)
PRODUCT = GemmConfig(
    *(1, 1536, 7168),
    trans_b=True,
    data_type=DataType.FP8_E4M3,
    c_type=DataType.BF16,
    scale_a="block1x128",
    scale_b="block128x128",
)
H100 = ResultEnvironment(
    *("0123456789abcdef", "triton", "3.6.0", "sm_90", 132, "triton-3.6.0-kernels-01234567"),
    *("NVIDIA H100 80GB HBM3", "sm_90", {"VllmMoe": "0123"}, {}),
)
TUNED = dict(zip(AXES, (16, 128, 128, 16, 8, 2), strict=True))
TUNED_TILE = {name: value for name, value in TUNED.items() if name.isupper()}
MOE_NAME = "E=512,N=128,device_name=NVIDIA_H100_80GB_HBM3,dtype=fp8_w8a8,block_shape=[128,128].json"


def results(solver: str, config: Config, best_ms: float, default_ms: float) -> list[SampleResult]:
    """A tuned result and that of the default."""
    facts: dict[str, Any] = {"kind": config.kind, "label": config.label, "environment": H100}
    family = MOE if isinstance(config, MoeConfig) else BLOCK_FP8
    default = family.default(config, TARGETS["sm_90"], "vllm" if "Vllm" in solver else "sglang")
    return [
        SampleResult(sample_record(config.canonical(), name, time_ms, params=params, **facts))
        for name, time_ms, params in (
            (solver, best_ms, tile_text(TUNED)),
            (solver + "Default", default_ms, tile_text(default)),
        )
    ]


def at(tokens: int, layer: MoeConfig = LAYER) -> MoeConfig:
    return replace(layer, tokens=tokens)


class _Folder(ExporterContract):
    """Two batch sizes, of which one gains."""

    library = "triton"
    solver: str
    names: Sequence[str]

    def configs(self) -> tuple[Config, Config]:
        return at(1), at(64)

    def samples(self) -> Sequence[SampleResult]:
        one, other = self.configs()
        return [*results(self.solver, one, 1.0, 1.5), *results(self.solver, other, 1.0, 1.02)]

    def expected(self) -> Sequence[Entry]:
        found = []
        exporter = self.exporter
        assert isinstance(exporter, TunedExporter)
        for tokens in GRID:
            first = self.configs()[0]
            layer = at(tokens) if isinstance(first, MoeConfig) else replace(PRODUCT, m=tokens)
            default = exporter.family.default(layer, TARGETS["sm_90"], exporter.consumer)
            if tokens != 64:
                default = exporter.family.canonical(layer, default, exporter.consumer)
            tile = TUNED if tokens == 1 else default
            for name in self.names:
                key = f"{name} {tokens}"
                found.append(Entry(key, exporter.form, (json.dumps(tile, sort_keys=True),)))
        return found


class TestVllmMoe(_Folder):
    exporter = VllmMoeExporter()
    solver, names = "VllmMoe", (MOE_NAME,)


class TestSglangMoe(_Folder):
    exporter = SglangMoeExporter()
    solver = "SglangMoe"
    names = tuple(
        f"configs/triton_3_6_0/{MOE_NAME.replace('[128,128]', '[128, 128]')}".replace(".json", end)
        for end in (".json", "_down.json")
    )


class TestBlockFp8(_Folder):
    exporter = BlockFp8Exporter()
    solver = "VllmBlockFp8"
    names = (
        "N=1536,K=7168,device_name=NVIDIA_H100_80GB_HBM3,dtype=fp8_w8a8,block_shape=[128,128].json",
    )

    def configs(self) -> tuple[Config, Config]:
        return PRODUCT, replace(PRODUCT, m=64)


class TestWinners(ExporterContract):
    exporter = WinnersExporter()
    library = "triton"

    def samples(self) -> Sequence[SampleResult]:
        return [*results("VllmMoe", at(1), 1.0, 1.5), *results("VllmMoe", at(64), 2.0, 1.5)]

    def expected(self) -> Sequence[Entry]:
        default = MOE.default(at(64), TARGETS["sm_90"], "vllm")
        return [
            Entry(f"{layer.label} on sm_90", "VllmMoe", (json.dumps(tile, sort_keys=True),))
            for layer, tile in ((at(1), TUNED), (at(64), default))
        ]


def documented() -> dict[str, Any]:
    """The functions that the documents load a file of tiles with."""
    page = (Path(__file__).parents[2] / "docs" / "gpu.md").read_text()
    (code,) = re.findall(r"```python\n(.*?)```", page, re.DOTALL)
    names: dict[str, Any] = {}
    exec(code, names)  # noqa: S102  # a page of this project
    return names


def test_the_loader_of_the_documents_finds_each_tile(tmp_path: Path) -> None:
    names = documented()
    file = export(tmp_path, WinnersExporter(), results("VllmMoe", at(1), 1.0, 1.5))
    tiles = names["load_tiles"](file, "sm_90", "VllmMoe")
    assert tiles == {at(1).label: (TUNED_TILE, {"num_warps": 8, "num_stages": 2})}


def own(body: str, time_ms: float, rows: int = 4096) -> list[SampleResult]:
    """A kernel of one's own, with the version of its file, and its baseline."""
    config = TritonKernelConfig("softmax", (("rows", rows), ("columns", 1024)), body * 64)
    return [
        SampleResult(
            sample_record(
                config.canonical(),
                solver,
                at_ms,
                kind=config.kind,
                label=config.label,
                params=json.dumps({"block": 256, "num_warps": warps}),
                environment=H100,
            )
        )
        for solver, at_ms, warps in (("TritonKernel", time_ms, 8), ("TritonKernelDefault", 2.0, 4))
    ]


def test_a_kernel_of_ones_own_is_found_by_its_name_and_its_shape(tmp_path: Path) -> None:
    names = documented()
    results = [*own("a", 1.0), *own("a", 3.0, rows=8), *own("b", 1.5, rows=8), *own("b", 9.0, 1)]
    source, exporter = SampleSource(results, "triton"), WinnersExporter()
    report = exporter.export(source, tmp_path, exporter.options_of({}))
    assert dict(report.skipped) == {"versions of a kernel's file have the same label": 1}
    tiles = names["load_tiles"](report.path, "sm_90", "softmax")
    assert {label: options["num_warps"] for label, (_, options) in tiles.items()} == {
        names["label_of"]("softmax", {"rows": 4096, "columns": 1024}): 8,
        names["label_of"]("softmax", {"rows": 1, "columns": 1024}): 4,
    }
    assert {tuple(arguments.items()) for arguments, _ in tiles.values()} == {(("block", 256),)}


def export(folder: Path, exporter: Exporter[Any], samples: Sequence[SampleResult]) -> Path:
    source = SampleSource(samples, "triton")
    return exporter.export(source, folder, exporter.options_of({})).path


def checked(folder: Path) -> Findings:
    return check(folder, CheckFacts(None, lambda *_: {}))


def as_vllm_reads(path: Path) -> dict[int, dict[str, int]]:
    """What `get_moe_configs` does with a file."""
    tuned = json.loads(path.read_text())
    tuned.pop("triton_version", None)
    return {int(key): value for key, value in tuned.items()}


def nearest(tiles: Mapping[int, Tile], tokens: int) -> Tile:
    """The tile that both consumers take for a batch size."""
    return tiles[min(tiles, key=lambda key: abs(key - tokens))]


def test_a_tile_is_written_where_it_gains_three_percent_and_the_default_elsewhere(
    tmp_path: Path,
) -> None:
    samples = [*results("VllmMoe", at(1), 1.0, 1.031), *results("VllmMoe", at(64), 1.0, 1.029)]
    folder = export(tmp_path, VllmMoeExporter(), samples)
    tiles = as_vllm_reads(folder / MOE_NAME)
    assert sorted(tiles) == list(GRID)
    assert tiles[1] == TUNED
    target = TARGETS["sm_90"]
    for tokens in GRID[1:]:
        layer = at(tokens)
        default = MOE.default(layer, target, "vllm")
        assert MOE.canonical(layer, tiles[tokens], "vllm") == MOE.canonical(layer, default, "vllm")
    for tokens in (1, 3, 5, 63, 1000, 9999):
        assert nearest(read_tiles(folder / MOE_NAME)[1], tokens) == nearest(tiles, tokens)
    facts = json.loads((folder / PROVENANCE).read_text())["files"][MOE_NAME]
    assert facts["keys"]["1"]["tile"] == "tuned"
    assert facts["keys"]["64"]["tile"].startswith("the default: nothing")
    assert facts["keys"]["4096"]["tile"] == "the default: not measured"
    assert checked(folder).faults == []


def test_layers_that_one_name_cannot_tell_apart_are_left_out(tmp_path: Path) -> None:
    other = replace(LAYER, hidden=4096)
    samples = [*results("VllmMoe", at(1), 1.0, 1.5), *results("VllmMoe", at(1, other), 1.0, 1.5)]
    alone = replace(LAYER, intermediate=256)
    folder = export(
        tmp_path, VllmMoeExporter(), [*samples, *results("VllmMoe", at(1, alone), 1, 2)]
    )
    names = sorted(path.name for path in folder.iterdir())
    assert names == [MOE_NAME.replace("N=128", "N=256"), PROVENANCE]


def test_products_that_differ_in_the_type_of_the_answer_are_left_out(tmp_path: Path) -> None:
    other = replace(PRODUCT, c_type=DataType.FP16)
    samples = [result for one in (PRODUCT, other) for result in results("VllmBlockFp8", one, 1, 2)]
    alone = results("VllmBlockFp8", replace(PRODUCT, n=512), 1, 2)
    folder = export(tmp_path, BlockFp8Exporter(), [*samples, *alone])
    name = TestBlockFp8.names[0].replace("N=1536", "N=512")
    assert sorted(path.name for path in folder.iterdir()) == [name, PROVENANCE]
    assert checked(folder).faults == []


def test_a_result_without_its_default_is_left_out(tmp_path: Path) -> None:
    samples = [*results("VllmMoe", at(1), 1.0, 1.5), results("VllmMoe", at(64), 1.0, 1.5)[0]]
    folder = export(tmp_path, VllmMoeExporter(), samples)
    facts = json.loads((folder / PROVENANCE).read_text())["files"][MOE_NAME]
    assert facts["keys"]["64"]["tile"] == "the default: not measured"


PAIR = "E=8,N=64,device_name=NVIDIA_H200"
GOOD = {str(tokens): TUNED for tokens in GRID}


def bad(**change: Any) -> dict[str, Any]:
    return {**GOOD, "64": {**TUNED, **change}}


@pytest.mark.parametrize(
    ("name", "content", "rule"),
    [
        (MOE_NAME, {"1": TUNED}, "grid"),
        (MOE_NAME, bad(BLOCK_SIZE_K=256), "clipped"),
        (MOE_NAME, bad(BLOCK_SIZE_M=256, BLOCK_SIZE_N=256, num_stages=5), "shared"),
        (MOE_NAME, bad(BLOCK_SIZE_Q=1), "tile"),
        (MOE_NAME, [], "damaged"),
        (MOE_NAME, {"one": TUNED}, "damaged"),
        (MOE_NAME.replace("fp8_w8a8", "bf16"), GOOD, "name"),
        (MOE_NAME.replace("[128,", "[128, "), GOOD, "name"),
        (f"triton_3_6_0/{MOE_NAME}", GOOD, "name"),
        (f"triton_3_6_0/{PAIR}.json", {"triton_version": "3.6.0", **GOOD}, "key"),
        (f"triton_3_6_0/{PAIR}_down.json", bad(BLOCK_SIZE_M=64), "pair"),
        (f"triton_3_6_0/{PAIR}_down.json", {**GOOD, "65": TUNED}, "pair"),
        ("N=1,K=2,device_name=X,dtype=fp8_w8a8,block_shape=[128,128].json", {"1": TUNED}, "grid"),
    ],
)
def test_each_planted_defect_is_found(
    tmp_path: Path, name: str, content: object, rule: str
) -> None:
    folder = tmp_path / "triton_3_6_0"
    folder.mkdir()
    for good in (tmp_path / MOE_NAME, *(folder / f"{PAIR}{end}.json" for end in ("", "_down"))):
        good.write_text(json.dumps(GOOD))
    assert checked(tmp_path).faults == []
    (tmp_path / name).write_text(json.dumps(content))
    found = checked(tmp_path)
    assert {(one.file, one.rule) for one in found.faults} == {(tmp_path / name, rule)}


def test_a_pair_without_its_first_file_is_found(tmp_path: Path) -> None:
    folder = tmp_path / "triton_3_6_0"
    folder.mkdir()
    (folder / f"{PAIR}_down.json").write_text(json.dumps(GOOD))
    assert [one.rule for one in checked(tmp_path).faults] == ["pair"]


def test_layers_on_one_name_are_found_by_their_provenance(tmp_path: Path) -> None:
    folder = export(tmp_path, VllmMoeExporter(), results("VllmMoe", at(1), 1.0, 1.5))
    text = (folder / PROVENANCE).read_text()
    facts = json.loads(text)
    facts["files"][MOE_NAME]["layers"].append([4096, 8, "BF16"])
    (folder / PROVENANCE).write_text(json.dumps(facts))
    assert [one.rule for one in checked(folder).faults] == ["collision"]
    (folder / PROVENANCE).write_text("[]")
    assert [one.rule for one in checked(folder).faults] == ["damaged"]


@pytest.mark.parametrize(
    ("device", "consumer", "expected"),
    [
        ("NVIDIA H200 NVL", "vllm", "NVIDIA_H200"),
        ("NVIDIA H200 NVL", "sglang", "NVIDIA_H200_NVL"),
        ("AMD Instinct MI250X / MI250", "vllm", "AMD_Instinct_MI250X_MI250"),
        ("AMD Instinct MI250X / MI250", "sglang", "AMD_Instinct_MI250X_/_MI250"),
    ],
)
def test_a_name_is_spelled_as_its_consumer_does(device: str, consumer: str, expected: str) -> None:
    from tuna.libraries.triton.tuned_files import file_name

    assert file_name(LAYER, device, consumer).device == expected


def test_names_lead_back() -> None:
    for name in (MOE_NAME, f"{PAIR}.json", f"{PAIR}_down.json"):
        found = parse_name(name)
        assert found is not None
        assert found.text == name
    assert parse_name("README.json") is None
