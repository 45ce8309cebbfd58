"""The trials of a GPU as a corpus: searches and exporters are answered from it, without one. Here
the times are made up."""

from __future__ import annotations

import json
import math
import random
from collections.abc import Iterator, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from benchmarks.gpu_corpus import MAX_BYTES, RecordedRun, Table, of_trials, read, write
from tuna.libraries.kernels import Past
from tuna.testing.exporter_contract import SampleResult, SampleSource
from tuna_triton.descriptions import DESCRIPTIONS
from tuna_triton.exporters import VllmMoeExporter
from tuna_triton.moe import MoeConfig
from tuna_triton.tiles import TARGETS, Tile, tile_of, tile_text
from tuna_triton.tuned_files import GRID, read_tiles

LAYER = MoeConfig(1, 512, 128, 2048, 10, scheme="fp8_w8a8", block_n=128, block_k=128)
VLLM = DESCRIPTIONS["VllmMoe"]
GAINING = (1, 64, 1024)  #: batch sizes with a tile that is much faster than the default


def made_up_ms(tile: Tile, tokens: int) -> float:
    """Smooth in the tile, with one best, and the same for all of a `GROUP_SIZE_M`."""
    far = abs(math.log2(tile["BLOCK_SIZE_M"] / 64)) + abs(tile["num_stages"] - 3)
    return (1 + 0.1 * far + 0.05 * (tile["num_warps"] == 8)) * (1 + tokens) / 1000


def lines() -> Iterator[dict[str, Any]]:
    """What `scripts/bench gpu --trials` writes of an exhaustive run."""
    environment = {
        **{"library_version": "3.6.0", "arch": "sm_90", "num_cu": 132, "target": "sm_90"},
        **{"toolchain": "triton-3.6.0", "device": "NVIDIA Fake H100 80GB HBM3"},
    }
    results, trials = [], []
    for tokens in GAINING:
        layer = replace(LAYER, tokens=tokens)
        space = VLLM.space(layer, TARGETS["sm_90"])
        assert space.default is not None
        times = {tile_text(tile): made_up_ms(tile, tokens) for tile in space.tiles}
        best = min(times, key=lambda params: times[params])
        default = tile_text(space.default)
        times[default] = 1.5 * times[best]
        for solver, params in (("VllmMoe", best), ("VllmMoeDefault", default)):
            ends = dict.fromkeys(("time_ms", "low_ms", "high_ms"), times[params])
            common = {"config": layer.json_text(), "solver": solver, "params": params}
            results.append({**common, **ends, "noisy": 0, "final_job_id": tokens})
        for params, time_ms in times.items():
            facts = {"config": layer.to_json(), "solver": "VllmMoe", "params": params}
            ends = dict.fromkeys(("time_ms", "low_ms", "high_ms"), time_ms)
            trials.append({**facts, **ends, "cause": None, "ended_early": 0, "build_s": 1.0})
    head = {"run": "exhaustive", "stand_in": True, "figures": {"seconds": 3.0}}
    yield {**head, "environment": environment, "results": results}
    yield from trials


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory) -> RecordedRun:
    """The run, through a file of trials and a corpus."""
    folder = tmp_path_factory.mktemp("corpus")
    path = folder / "trials"
    path.write_text("".join(f"{json.dumps(one)}\n" for one in lines()) * 2)  # the last one counts
    runs = of_trials(path)
    write(folder / "corpus.gz", runs)
    assert read(folder / "corpus.gz") == runs
    (found,) = runs
    assert found.stand_in
    assert [len(table.trials) for table in found.tables] == [
        len(VLLM.space(replace(LAYER, tokens=tokens), TARGETS["sm_90"]).tiles) for tokens in GAINING
    ]
    return found


def test_a_corpus_is_small(run: RecordedRun, tmp_path: Path) -> None:
    write(tmp_path / "corpus.gz", [run])
    assert (tmp_path / "corpus.gz").stat().st_size < MAX_BYTES / 50
    noise = random.Random(1).randbytes(MAX_BYTES).hex()  # which no compressor makes small enough
    large = Table({}, "VllmMoe", [(noise, 1.0, 1.0, 1.0, None)])
    with pytest.raises(SystemExit, match="more than 2000000"):
        write(tmp_path / "large.gz", [replace(run, tables=[large])])
    assert not (tmp_path / "large.gz").exists()


def test_a_search_is_answered_from_it(run: RecordedRun) -> None:
    table = run.tables[-1]
    every = [params for params, *_ in table.trials]

    def in_order(history: Sequence[Past], count: int) -> list[str]:
        return every[len(history) : len(history) + count]

    assert table.searched(in_order, len(every), 16) == 1
    some = table.searched(in_order, 20, 16)
    assert some == min(ms for _, ms, *_ in table.trials[:20] if ms) / table.best_ms
    # what was never measured fails, and a search without a time is infinitely behind
    assert table.searched(lambda *_: ["other"], 1, 16) == math.inf


def test_exporters_write_folders_from_it(run: RecordedRun, tmp_path: Path) -> None:
    source = SampleSource([SampleResult(one) for one in run.records()], "triton")
    exporter = VllmMoeExporter()
    folder = exporter.export(source, tmp_path / "out", exporter.options_of({})).path
    (path,) = folder.glob("E=*.json")
    tiles = read_tiles(path)[1]
    assert set(tiles) >= set(GRID)
    for table in run.tables:
        best = min(table.trials, key=lambda one: one[1] or math.inf)[0]
        tile = tiles[table.config["tokens"]]
        assert {name: tile[name] for name in tile_of(best)} == dict(tile_of(best))
