"""Files of tile sizes: their names, and the defects that are found in them."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from test_triton_exports import GEMM_NAME, LAYER, MOE_NAME, PRODUCT, SPACED, TUNED, checked

from tuna_triton.tuned_files import GRID, file_name, parse_name

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
        (f"triton_3_6_0/{PAIR}_down.json", {**GOOD, "65": {**TUNED, "BLOCK_SIZE_M": 64}}, "pair"),
        ("N=1,K=2,device_name=X,dtype=fp8_w8a8,block_shape=[128,128].json", {"1": TUNED}, "grid"),
        (MOE_NAME, {}, "grid"),
        (MOE_NAME, {key: TUNED for key in GOOD if int(key) > 1024}, "grid"),
        (GEMM_NAME, {"triton_version": "3.6.0", **GOOD}, "key"),
        (GEMM_NAME, bad(BLOCK_SIZE_K=256), "scale"),
        (GEMM_NAME.replace("[128,", "[128, "), bad(BLOCK_SIZE_K=256), "scale"),
        (f"triton_3_6_0/{SPACED}", bad(BLOCK_SIZE_K=256), "scale"),
        (MOE_NAME.replace("fp8_w8a8", "int8_w8a8"), GOOD, "name"),
        (GEMM_NAME.replace("fp8_w8a8", "int8_w8a8"), GOOD, "name"),
        (f"{PAIR}_NVL.json", GOOD, "name"),
        (MOE_NAME, bad(USE_TMA=True), "tile"),
        (MOE_NAME, bad(waves_per_eu=2), "tile"),
        (MOE_NAME, bad(BLOCK_SIZE_N=96), "tile"),
        (MOE_NAME, bad(BLOCK_SIZE_N="64"), "tile"),
        (MOE_NAME, bad(num_stages=None), "tile"),
        (f"triton_3_6_0/{SPACED}", bad(SPLIT_K=1), "tile"),
        (GEMM_NAME.replace("[128,", "[128, "), bad(SWAP_AB=False), "tile"),
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


@pytest.mark.parametrize(
    ("name", "content"),
    [
        (MOE_NAME, {**bad(SPLIT_K=1), "triton_version": "3.6.0", "8192": TUNED}),
        (MOE_NAME, {key: TUNED for key in GOOD if key not in ("24", "48", "96", "1536", "3072")}),
        (f"triton_3_6_0/{PAIR}_down.json", {**bad(USE_TMA=True), "65": TUNED}),
        (GEMM_NAME.replace("K=7168", "K=128"), bad(BLOCK_SIZE_K=256)),
        (GEMM_NAME.replace("[128,", "[128, "), bad(SWAP_AB=True, SPLIT_K=4)),
        ("E=8,N=64,device_name=AMD_Instinct_MI300X.json", bad(waves_per_eu=2, kpack=2)),
        ("E=8,N=64,device_name=Radeon_8060S_Graphics.json", bad(waves_per_eu=2)),
        ("E=8,N=64,device_name=Intel(R)_Arc(TM)_Pro_B70_Graphics.json", bad(grf_mode="256")),
        (
            "E=8,N=64,device_name=NVIDIA_H200,dtype=int4_w4a16.json",
            {**GOOD, "1": {"BLOCK_SIZE_M": 16, "GROUP_SIZE_M": 1}},
        ),
    ],
)
def test_a_file_that_its_consumer_takes_has_no_defect(
    tmp_path: Path, name: str, content: object
) -> None:
    (tmp_path / "triton_3_6_0").mkdir()
    (tmp_path / f"triton_3_6_0/{PAIR}.json").write_text(json.dumps(GOOD))
    (tmp_path / name).write_text(json.dumps(content))
    assert checked(tmp_path).faults == []


def test_a_pair_without_its_first_file_is_found(tmp_path: Path) -> None:
    folder = tmp_path / "triton_3_6_0"
    folder.mkdir()
    (folder / f"{PAIR}_down.json").write_text(json.dumps(GOOD))
    assert [one.rule for one in checked(tmp_path).faults] == ["pair"]


@pytest.mark.parametrize(
    ("device", "consumer", "expected"),
    [
        ("NVIDIA H200 NVL", "vllm", ("NVIDIA_H200", "NVIDIA_H200_NVL")),
        ("NVIDIA H200 NVL", "sglang", ("NVIDIA_H200_NVL",) * 2),
        ("AMD Instinct MI250X / MI250", "vllm", ("AMD_Instinct_MI250X_MI250",) * 2),
        ("AMD Instinct MI250X / MI250", "sglang", ("AMD_Instinct_MI250X_/_MI250",) * 2),
    ],
)
def test_a_name_is_spelled_as_its_consumer_does(
    device: str, consumer: str, expected: tuple[str, str]
) -> None:
    assert tuple(file_name(one, device, consumer).device for one in (LAYER, PRODUCT)) == expected


def test_names_lead_back() -> None:
    for name in (MOE_NAME, f"{PAIR}.json", f"{PAIR}_down.json"):
        found = parse_name(name)
        assert found is not None
        assert found.text == name
    assert parse_name("README.json") is None
