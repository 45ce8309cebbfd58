"""Inputs and right answers of a device's kernels, computed here as the kernels do it."""

from __future__ import annotations

import math
from dataclasses import replace

import ml_dtypes
import numpy as np
import pytest
from numpy.typing import NDArray

from tuna.configs import Config, DataType, GemmConfig, parse_line
from tuna.errors import BadInput
from tuna_triton import device_problems
from tuna_triton.artifact import Buffer
from tuna_triton.descriptions import DESCRIPTIONS
from tuna_triton.device_problems import DeviceProblem, decode
from tuna_triton.moe import FP8, INT8, MoeConfig
from tuna_triton.tiles import AXES, TARGETS

Array = NDArray[np.float64]
MOE = MoeConfig(tokens=11, experts=6, intermediate=24, hidden=40, topk=2)
CONVOLUTION = "MIOpenDriver conv -n 1 -c 3 -H 8 -W 8 -k 4 -y 3 -x 3 -p 1 -q 1 -F 1"
FP8_TYPE = DataType.FP8_E4M3


def problem(
    config: Config, solver: str, rows: int = 16
) -> tuple[DeviceProblem, dict[str, Buffer], dict[str, Array]]:
    """The problem of a candidate whose tile has so many rows, its buffers, and all its inputs."""
    tile = dict(zip(AXES, (rows, 64, 32, 1, 4, 2), strict=True))
    family = DESCRIPTIONS[solver].family
    plan = family.plan(config, tile, TARGETS["sm_90"], DESCRIPTIONS[solver].package)
    buffers = {one.name: one for one in plan.buffers}
    made = DeviceProblem(config, buffers)
    whole = {
        name: decode(content.buffer.element, np.resize(content.block, content.buffer.shape))
        for name, content in made.inputs.items()
    }
    return (
        made,
        buffers,
        {name: values.reshape(buffers[name].shape) for name, values in whole.items()},
    )


def all_of(made: DeviceProblem, output: Buffer) -> Array:
    rows, columns = output.shape
    return made.expected(output.name, np.arange(rows), np.arange(columns))


@pytest.mark.parametrize(
    ("element", "kind"),
    [
        ("fp8e4nv", ml_dtypes.float8_e4m3fn),
        ("fp8e5", ml_dtypes.float8_e5m2),
        ("fp8e4b8", ml_dtypes.float8_e4m3fnuz),
        ("fp8e5b16", ml_dtypes.float8_e5m2fnuz),
        ("bf16", ml_dtypes.bfloat16),
        ("fp16", np.float16),
        ("i8", np.int8),
    ],
)
def test_bits_have_their_values(element: str, kind: type) -> None:
    size = np.dtype(kind).itemsize
    bits = np.arange(256**size, dtype=f"u{size}")
    with np.errstate(invalid="ignore"):  # of signaling NaN
        found, right = decode(element, bits), bits.view(kind).astype(np.float64)
    assert np.array_equal(found, right, equal_nan=True)


@pytest.mark.parametrize("element", ["fp32", "fp16", "bf16", "fp8e4nv", "fp8e5", "fp8e4b8"])
def test_poison_is_no_number(element: str) -> None:
    raw = np.full(8, device_problems.poison_byte(element), np.uint8)
    assert np.all(np.isnan(decode(element, raw)))


@pytest.mark.parametrize("trans_b", [False, True])
@pytest.mark.parametrize("data_type", [DataType.BF16, DataType.FP16])
def test_a_product_is_that_of_its_matrices(data_type: DataType, trans_b: bool) -> None:
    config = GemmConfig(7, 9, 5, data_type=data_type, trans_b=trans_b)
    made, buffers, given = problem(config, "TritonGemm")
    right = given["a"] @ (given["b"].T if trans_b else given["b"])
    assert np.allclose(all_of(made, buffers["c"]), right, rtol=1e-12)
    assert 0.3 < np.std(given["a"]) < 0.8
    assert not np.array_equal(given["a"].ravel()[:35], given["b"].ravel()[:35])


def test_a_product_of_blocks_has_their_factors() -> None:
    config = GemmConfig(
        *(7, 40, 48),
        trans_b=True,
        data_type=FP8_TYPE,
        c_type=DataType.BF16,
        scale_a="block1x16",
        scale_b="block16x16",
    )
    made, buffers, given = problem(config, "TritonBlockFp8")
    a = given["a"] * np.repeat(given["a_scale"], 16, axis=1)
    b = given["b"] * np.repeat(np.repeat(given["b_scale"], 16, axis=0), 16, axis=1)[:40, :48]
    assert np.allclose(all_of(made, buffers["c"]), a @ b.T, rtol=1e-12)
    assert made.tolerance("c") == 1.6e-2


SCHEMES = [
    MOE,
    replace(MOE, scheme=FP8),
    replace(MOE, scheme=FP8, block_n=16, block_k=8),
    replace(MOE, scheme=INT8),
]


@pytest.mark.parametrize("rows", [16, 4])
@pytest.mark.parametrize("config", SCHEMES, ids=lambda one: one.label)
def test_experts_are_those_of_the_sorted_rows(config: MoeConfig, rows: int) -> None:
    """Each product by the lists of rows that the kernel is given."""
    made, buffers, given = problem(config, "TritonMoe", rows)
    ids = given["sorted_token_ids"].astype(int)
    owners, padded = given["expert_ids"].astype(int), int(given["num_tokens_post_padded"][0])
    routed = config.tokens * config.topk
    assert sorted(ids[:padded][ids[:padded] < routed]) == list(range(routed))
    assert np.all(ids[padded:] == routed)
    for name, top_k in (("up", config.topk), ("down", 1)):
        a, b, output = given[f"{name}_a"], given[f"{name}_b"], buffers[f"{name}_c"]
        if config.block_n:
            deep, (wide, of) = config.block_k, (config.block_n, b.shape)
            a = a * np.repeat(given[f"{name}_a_scale"], deep, axis=1)[:, : of[2]]
            scale = np.repeat(np.repeat(given[f"{name}_b_scale"], wide, axis=1), deep, axis=2)
            b = b * scale[:, : of[1], : of[2]]
        elif config.scheme == FP8:
            a, b = a * given[f"{name}_a_scale"], b * given[f"{name}_b_scale"][:, None, None]
        elif config.scheme == INT8:
            b = b * given[f"{name}_b_scale"][:, :, None]
        right = np.full(output.shape, np.nan)
        for place in range(padded):
            if ids[place] < routed:
                right[ids[place]] = b[owners[place // rows]] @ a[ids[place] // top_k]
        if name == "down":
            right *= given["topk_weights"][:, None]
        assert np.allclose(all_of(made, output), right, rtol=1e-10)


def test_few_tokens_have_a_tile_each_where_the_consumer_sorts_none() -> None:
    config = replace(MOE, tokens=1, topk=1)
    made, buffers, given = problem(config, "VllmMoe")
    assert "sorted_token_ids" not in buffers
    (owner,) = given["expert_ids"].astype(int)
    right = given["up_b"][owner] @ given["up_a"][0]
    assert np.allclose(all_of(made, buffers["up_c"])[0], right, rtol=1e-12)
    assert given["num_tokens_post_padded"][0] >= 256


def test_a_large_array_repeats_a_block_of_prime_length() -> None:
    assert all(
        device_problems.BLOCK % factor for factor in range(2, math.isqrt(device_problems.BLOCK) + 1)
    )
    config = GemmConfig(4096, 2048, 16, data_type=DataType.FP16)
    config = replace(config, k=2048)
    made, buffers, _ = problem(config, "TritonGemm")
    a = made.inputs["a"]
    assert len(a.block) == device_problems.BLOCK < math.prod(buffers["a"].shape)
    row, column = divmod(device_problems.BLOCK + 5, 2048)
    assert a.at(row, column) == a.at(0, 5)


def test_inputs_are_the_same_again_and_experts_change_in_a_rotation() -> None:
    first, _, _ = problem(MOE, "TritonMoe")
    again, _, _ = problem(MOE, "TritonMoe")
    for name, content in first.inputs.items():
        assert np.array_equal(content.block, again.inputs[name].block)
    blocks = [first.rotated("expert_ids", place, 3) for place in range(3)]
    assert not np.array_equal(blocks[0], blocks[1])
    assert all(np.max(block) < MOE.experts for block in blocks)
    assert np.array_equal(first.rotated("up_a", 1, 3), first.inputs["up_a"].block)


def test_what_has_no_reference_on_a_device_is_refused() -> None:
    with pytest.raises(BadInput, match="no reference on a device"):
        DeviceProblem(parse_line(CONVOLUTION)[0], {})
