"""Folders of tile sizes: written, read as their consumers read them, and checked."""

from __future__ import annotations

import json
import re
from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any, ClassVar

import pytest

from tuna.configs import Config, GemmConfig
from tuna.configs.values import DataType
from tuna.errors import NotFound
from tuna.exports.database_files import check
from tuna.libraries.exporter import CheckFacts, Entry, Exporter, Findings
from tuna.libraries.results import ResultEnvironment
from tuna.testing.exporter_contract import (
    ExporterContract,
    SampleResult,
    SampleSource,
    sample_record,
)
from tuna.vocabulary import BASELINE
from tuna_triton.descriptions import DESCRIPTIONS
from tuna_triton.exporters import (
    BlockFp8Exporter,
    SglangMoeExporter,
    TunedExporter,
    VllmMoeExporter,
    WinnersExporter,
)
from tuna_triton.kernel_arguments import MOE
from tuna_triton.moe import MoeConfig
from tuna_triton.tiles import AXES, TARGETS, Tile, tile_text
from tuna_triton.triton_kernel import TritonKernelConfig
from tuna_triton.tuned_files import GRID, PROVENANCE, read_tiles

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
_END = "device_name=NVIDIA_H100_80GB_HBM3,dtype=fp8_w8a8,block_shape=[128,128].json"
MOE_NAME, GEMM_NAME = f"E=512,N=128,{_END}", f"N=1536,K=7168,{_END}"
SPACED = MOE_NAME.replace("[128,", "[128, ")


def results(
    solver: str,
    config: Config,
    best_ms: float,
    default_ms: float,
    *,
    finals: tuple[int | None, int | None] = (9, 9),
    spread: float = 0.005,
) -> list[SampleResult]:
    """A tuned result and that of the default, with the jobs of their finals and the half width of
    their intervals."""
    facts: dict[str, Any] = {"kind": config.kind, "label": config.label, "environment": H100}
    consumer = DESCRIPTIONS[solver].package
    family = DESCRIPTIONS[solver].family
    default = family.canonical(config, family.default(config, TARGETS["sm_90"], consumer), consumer)
    return [
        SampleResult(
            sample_record(
                config.text(),
                name,
                time_ms,
                params=tile_text(tile),
                family=of,
                low_ms=time_ms * (1 - spread),
                high_ms=time_ms * (1 + spread),
                final_job_id=job,
                **facts,
            )
        )
        for name, time_ms, tile, of, job in (
            (solver, best_ms, TUNED, "GEMM", finals[0]),
            (solver + "Default", default_ms, default, BASELINE, finals[1]),
        )
    ]


def at(tokens: int, layer: MoeConfig = LAYER) -> MoeConfig:
    return replace(layer, tokens=tokens)


class _Folder(ExporterContract):
    """Two batch sizes, of which one gains."""

    library = "triton"
    solvers: Mapping[str, Sequence[str]]  #: with the names of their files
    tuned: Tile = TUNED  #: as it is written at 1

    def configs(self) -> tuple[Config, Config]:
        return at(1), at(64)

    def samples(self) -> Sequence[SampleResult]:
        one, other = self.configs()
        pairs = ((one, 1.5), (other, 1.02))
        return [
            result
            for solver in self.solvers
            for config, default_ms in pairs
            for result in results(solver, config, 1.0, default_ms)
        ]

    def expected(self) -> Sequence[Entry]:
        found = []
        exporter = self.exporter
        assert isinstance(exporter, TunedExporter)
        for tokens in GRID:
            first = self.configs()[0]
            layer = at(tokens) if isinstance(first, MoeConfig) else replace(PRODUCT, m=tokens)
            for solver, names in self.solvers.items():
                consumer = DESCRIPTIONS[solver].package
                default = exporter.family.default(layer, TARGETS["sm_90"], consumer)
                tile = json.dumps(self.tuned if tokens == 1 else default, sort_keys=True)
                found += [Entry(f"{name} {tokens}", exporter.form, (tile,)) for name in names]
        return found


class TestVllmMoe(_Folder):
    exporter = VllmMoeExporter()
    solvers: ClassVar = {"VllmMoe": (MOE_NAME,)}


class TestSglangMoe(_Folder):
    exporter = SglangMoeExporter()
    solvers: ClassVar = {
        "SglangMoe": tuple(
            f"configs/triton_3_6_0/{SPACED}".replace(".json", end)
            for end in (".json", "_down.json")
        )
    }


class TestBlockFp8(_Folder):
    exporter = BlockFp8Exporter()
    #: one folder holds the files of both, which neither confuses
    solvers: ClassVar = {
        "VllmBlockFp8": (GEMM_NAME,),
        "SglangBlockFp8": (GEMM_NAME.replace("[128,", "[128, "),),
    }
    tuned: ClassVar = {**TUNED, "GROUP_SIZE_M": 1}

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
    page = (Path(__file__).parents[3] / "docs" / "gpu.md").read_text()
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
                config.text(),
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
    for tokens in GRID[1:]:
        assert tiles[tokens] == MOE.default(at(tokens), TARGETS["sm_90"], "vllm")
    facts = json.loads((folder / PROVENANCE).read_text())["files"][MOE_NAME]
    assert facts["keys"]["1"]["tile"] == "tuned"
    assert facts["keys"]["64"]["tile"] == "the default: nothing is 3 % faster"
    assert facts["keys"]["4096"]["tile"] == "the default: not measured"
    best = {"time_ms": 1.0, "low_ms": 0.995, "high_ms": 1.005, "final_job_id": 9}
    assert facts["keys"]["1"]["best"] == pytest.approx(best)
    assert checked(folder).faults == []


@pytest.mark.parametrize(
    ("default_ms", "facts", "tile"),
    [
        (1.2, {}, "tuned"),
        (1.2, {"finals": (9, None)}, "the default: not in the finals of the best tile"),
        (1.2, {"finals": (9, 8)}, "the default: not in the finals of the best tile"),
        (1.31, {"finals": (None, None)}, "tuned"),  # so far apart that there are no finals
        (1.04, {"spread": 0.025}, "the default: its interval overlaps that of the best tile"),
        (0.9, {"finals": (None, None)}, "the default: nothing is 3 % faster"),
    ],
)
def test_only_times_that_were_measured_in_turn_are_compared(
    tmp_path: Path, default_ms: float, facts: dict[str, Any], tile: str
) -> None:
    source = SampleSource(results("VllmMoe", at(64), 1.0, default_ms, **facts), "triton")
    report = VllmMoeExporter().export(source, tmp_path, VllmMoeExporter.options())
    origin = json.loads((report.path / PROVENANCE).read_text())["files"][MOE_NAME]["keys"]["64"]
    assert origin["tile"] == tile
    notes = {"the default is written: not measured": len(GRID) - 1}
    written = tile.replace("default:", "default is written:")
    assert report.notes == notes | ({} if tile == "tuned" else {written: 1})


def test_the_default_that_wins_is_no_tuned_tile(tmp_path: Path) -> None:
    samples = results("VllmMoe", at(64), 1.0, 1.5)
    params = samples[1].record.params
    samples[0] = replace(samples[0], record=samples[0].record._replace(params=params))
    folder = export(tmp_path, VllmMoeExporter(), samples)
    facts = json.loads((folder / PROVENANCE).read_text())["files"][MOE_NAME]
    assert facts["keys"]["64"]["tile"] == "the default: it is the fastest"


def test_results_of_tunas_own_kernels_are_for_no_consumer(tmp_path: Path) -> None:
    own = [*results("TritonMoe", at(1), 1, 2), *results("SglangMoe", at(1), 1, 2)]
    with pytest.raises(NotFound, match="4 left out: of a kernel that vllm does not run"):
        export(tmp_path, VllmMoeExporter(), own)


def test_a_group_of_all_rows_is_one_for_every_batch_size_of_its_key(tmp_path: Path) -> None:
    """At 1024 rows a group of 64 tiles of 16 is all of them; up to 1280, where 1536 is as near,
    there are 80, and the widest group is taken."""
    samples = [
        result
        for m in (16, 256, 1024)
        for result in results("VllmBlockFp8", replace(PRODUCT, m=m), 1, 2)
    ]
    folder = export(tmp_path, BlockFp8Exporter(), samples)
    tiles = read_tiles(folder / GEMM_NAME)[1]
    groups = {tokens: tiles[tokens]["GROUP_SIZE_M"] for tokens in (16, 256, 1024)}
    assert groups == {16: 16, 256: 32, 1024: 16}


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
    name = GEMM_NAME.replace("N=1536", "N=512")
    assert sorted(path.name for path in folder.iterdir()) == [name, PROVENANCE]
    assert checked(folder).faults == []


def test_a_result_without_its_default_is_left_out(tmp_path: Path) -> None:
    samples = [*results("VllmMoe", at(1), 1.0, 1.5), results("VllmMoe", at(64), 1.0, 1.5)[0]]
    folder = export(tmp_path, VllmMoeExporter(), samples)
    facts = json.loads((folder / PROVENANCE).read_text())["files"][MOE_NAME]
    assert facts["keys"]["64"]["tile"] == "the default: not measured"


def test_layers_on_one_name_are_found_by_their_provenance(tmp_path: Path) -> None:
    folder = export(tmp_path, VllmMoeExporter(), results("VllmMoe", at(1), 1.0, 1.5))
    text = (folder / PROVENANCE).read_text()
    facts = json.loads(text)
    facts["files"][MOE_NAME]["layers"].append([4096, 8, "BF16"])
    (folder / PROVENANCE).write_text(json.dumps(facts))
    assert [one.rule for one in checked(folder).faults] == ["collision"]
    (folder / PROVENANCE).write_text("[]")
    assert [one.rule for one in checked(folder).faults] == ["damaged"]
