"""Triton's candidates as a space of the search: no Triton is needed."""

from __future__ import annotations

import json
import random
import statistics
from dataclasses import replace

import pytest

from benchmarks.tile_search import LAYERS, searched
from tuna.configs import GemmConfig
from tuna.configs.values import DataType
from tuna.libraries.kernels import Known, Past
from tuna.libraries.search.proposal import propose
from tuna_triton.descriptions import DESCRIPTIONS
from tuna_triton.moe import MoeConfig
from tuna_triton.space import TileSpace
from tuna_triton.tiles import TARGETS, tile_text

MOE = MoeConfig(64, 512, 128, 2048, 10, scheme="fp8_w8a8", block_n=128, block_k=128)
GEMM = GemmConfig(512, 1024, 768, data_type=DataType.BF16)
SM90 = TARGETS["sm_90"]


def space_of(config: MoeConfig | GemmConfig, arch: str = "sm_90") -> TileSpace:
    name = "TritonMoe" if isinstance(config, MoeConfig) else "TritonGemm"
    return TileSpace(DESCRIPTIONS[name], config, TARGETS[arch])


@pytest.mark.parametrize("arch", ["sm_90", "gfx942"])
@pytest.mark.parametrize("config", [MOE, GEMM], ids=["moe", "gemm"])
def test_points_are_the_tiles_that_differ_and_can_run(
    config: MoeConfig | GemmConfig, arch: str
) -> None:
    space = space_of(config, arch)
    name = "TritonMoe" if isinstance(config, MoeConfig) else "TritonGemm"
    found = DESCRIPTIONS[name].space(config, TARGETS[arch])
    points = list(space.points())
    texts = [space.params_of(point) for point in points]
    assert {*texts} == {*map(tile_text, found.tiles)}
    assert len(points) == space.size() == len(found.tiles)
    assert [space.point_of(text or "") for text in texts] == points
    assert space.point_of("{}") is space.point_of("no JSON") is space.features_of("{}") is None
    assert found.default is not None
    assert [space.params_of(point) for point in space.begins_with] == [tile_text(found.default)]
    chance, known = random.Random(1), set(points)
    for _ in range(50):
        one, other = space.random(chance), space.random(chance)
        changed = space.mutated(one, chance)
        assert {one, changed, space.crossed(one, other, chance)} <= known
        assert sum(a != b for a, b in zip(one, changed, strict=True)) == 1


def test_features_of_a_tile_say_what_it_does_at_a_batch_size() -> None:
    space = space_of(MOE)
    tile = json.dumps(
        {
            **{"BLOCK_SIZE_M": 64, "BLOCK_SIZE_N": 256, "BLOCK_SIZE_K": 128},
            **{"GROUP_SIZE_M": 1, "num_warps": 8, "num_stages": 3},
        }
    )
    many = space.features_of(tile, replace(MOE, tokens=4096))
    few = space.features_of(tile)
    assert few is not None
    assert many is not None
    assert few.keys() == many.keys()
    assert few["num_warps"] == many["num_warps"] == 8
    # three buffers of both inputs in 8 bits, one of them for asynchronous products
    assert few["shared bytes"] == 3 * 128 * (64 + 256)
    # 640 rows on 512 experts, of which some have none: nearly all of a tile of 64 rows is padding
    assert 1.5 < few["fill of launch 0"] * 64 < 2
    assert few["padded rows of launch 0"] > 30
    # 40960 rows: 80 for each expert, in tiles of 64
    assert many["fill of launch 0"] == pytest.approx(80 / 64)
    assert many["padded rows of launch 0"] == pytest.approx((80 / 64 + 0.5) / (80 / 64))
    assert many["steps of launch 0"] == 2048 / 128
    assert many["steps of launch 1"] == 1
    assert many["bytes of a program of launch 0"] == 2048 * (64 + 256)


@pytest.mark.usefixtures("xgboost_here")
def test_a_round_begins_with_the_default_and_learns_from_other_batch_sizes() -> None:
    space = space_of(MOE)
    first = propose(space, [], count=16, seed=3)
    assert first[0] == space.params_of(space.begins_with[0])
    assert len({*first}) == 16

    def time_ms(params: str) -> float:
        tile = json.loads(params)
        return 1 + abs(tile["BLOCK_SIZE_M"] - 32) / 64 + tile["num_stages"] / 10

    nearby = replace(MOE, tokens=96)
    other = TileSpace(DESCRIPTIONS["TritonMoe"], nearby, SM90)
    trials = [Past(one, time_ms(one)) for one in propose(other, [], count=64, seed=0)]
    known = [Known("96", trials, same=False, config=nearby)]
    warm = propose(space, [], count=16, seed=3, others=known)
    assert sorted(map(time_ms, warm))[8] < min(map(time_ms, first[1:])) + 0.2
    assert sorted(map(time_ms, warm))[8] < sorted(map(time_ms, first))[8]


def test_all_are_tried_once_where_that_is_asked_for() -> None:
    config = replace(MOE, tokens=2)
    space = space_of(config)
    history: list[Past] = []
    while batch := propose(space, history, count=32, seed=1, strategy="exhaustive"):
        history += [Past(one) for one in batch]
    texts = [one.params for one in history]
    assert len(texts) == len({*texts}) == space.size()
    assert texts[0] == space.params_of(space.begins_with[0])


@pytest.mark.usefixtures("xgboost_here")
def test_searches_beside_each_other_come_close_to_all_trials_on_a_simulated_device() -> None:
    """Of one seed; `scripts/bench tile_search` has more."""
    found = [search.over_best() for search in searched(LAYERS["E512"], "beside", 0)]
    assert statistics.geometric_mean(found) < 1.01
    assert max(found) < 1.08
