"""Files of vLLM's state updates: written from reported times, and the defects that are found."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from test_triton_exports import checked

from tuna import api
from tuna.exports.registry import exporter_of
from tuna_triton.state_update_forms import StateUpdateFolder, StateUpdateTimes

TypeIn = Callable[..., Any]
DEVICE = "NVIDIA H100 80GB HBM3"
NAME = "headdim=64,dstate=128,device_name=NVIDIA_H100_80GB_HBM3,cache_dtype=float16.json"
TILE = {"BLOCK_SIZE_M": 4, "num_warps": 1}
GOOD: dict[str, Any] = {"triton_version": "3.8.0", **{str(8 << n): TILE for n in range(14)}}
HEAD = {"format": "vllm-ssu-times", "device": DEVICE, "triton": "3.8.0"}


def bad(**change: Any) -> dict[str, Any]:
    return {**GOOD, "64": {**TILE, **change}}


def row(batch: int, block: int, time_ms: float, **more: Any) -> dict[str, Any]:
    sizes = {"headdim": 64, "dstate": 128, "cache_dtype": "float16", "effective_batch": batch}
    return {**sizes, "BLOCK_SIZE_M": block, "num_warps": 1, "time_ms": time_ms, **more}


def times(path: Path, *rows: dict[str, Any]) -> Path:
    path.write_text("".join(json.dumps(one) + "\n" for one in (HEAD, *rows)))
    return path


@pytest.mark.parametrize(
    ("name", "content", "rule"),
    [
        (NAME, [], "damaged"),
        (NAME, {"triton_version": "3.8.0"}, "grid"),
        (NAME, {"8": TILE, "4096": TILE}, "grid"),
        (NAME, {**GOOD, "64.0": TILE}, "key"),
        (NAME, {**GOOD, " 64": TILE}, "key"),
        (NAME, {**GOOD, "64": [4, 1]}, "tile"),
        (NAME, {**GOOD, "64": {"BLOCK_SIZE_M": 4}}, "tile"),
        (NAME, bad(num_stages=3), "tile"),
        (NAME, bad(BLOCK_SIZE_M=12), "tile"),
        (NAME, bad(num_warps="4"), "tile"),
        (NAME, bad(num_warps=64), "tile"),
        (NAME, bad(BLOCK_SIZE_M=128), "tile"),
        (NAME.replace("float16", "bfloat16"), GOOD, "name"),
        (NAME.replace("H100_80GB", "H100 80GB"), GOOD, "name"),
    ],
)
def test_each_planted_defect_is_named(
    tmp_path: Path, name: str, content: object, rule: str
) -> None:
    good = tmp_path / NAME.replace("float16", "float32")
    good.write_text(json.dumps(GOOD))
    assert checked(tmp_path).faults == []
    (tmp_path / name).write_text(json.dumps(content))
    found = {(one.file, one.rule) for one in checked(tmp_path).faults}
    assert found == {(tmp_path / name, rule)}


def test_the_fastest_tile_of_each_batch_is_written_and_the_same_bytes_again(
    type_in: TypeIn, tmp_path: Path
) -> None:
    rows = [row(8, 4, 0.02), row(8, 16, 0.01), row(64, 8, 0.03)]
    ended = type_in("tuna", "import-db", times(tmp_path / "a.jsonl", *rows))
    assert ended.out.startswith("3 reported times of 2 layers"), ended
    for folder in ("first", "second"):
        words = ("--form", "vllm-ssu", "--allow-reported", "-d", tmp_path / folder)
        assert type_in("tuna", "export", *words).code == 0
    first, second = (next((tmp_path / one).glob("*.vllm-ssu")) for one in ("first", "second"))
    assert (first / NAME).read_bytes() == (second / NAME).read_bytes()
    assert json.loads((first / NAME).read_text()) == {
        "triton_version": "3.8.0",
        "8": {"BLOCK_SIZE_M": 16, "num_warps": 1},
        "64": {"BLOCK_SIZE_M": 8, "num_warps": 1},
    }
    assert isinstance(exporter_of(first), StateUpdateFolder)
    assert checked(first).faults == []


def test_a_state_in_bfloat16_has_the_file_of_float16(tmp_path: Path) -> None:
    path = times(tmp_path / "a.jsonl", row(8, 4, 0.02, cache_dtype="bfloat16"))
    (found,) = StateUpdateTimes().read(path).rows
    assert json.loads(found.subject)["cache_dtype"] == "float16"


@pytest.mark.parametrize(
    ("line", "why"),
    [
        ("{", "it is not JSON"),
        (json.dumps(row(8, 4, 0.0)), "its time is not"),
        (json.dumps(row(0, 4, 0.1)), "it is not a state update"),
        (json.dumps(row(8, 4, 0.1, cache_dtype="int8")), "it is not a state update"),
        (json.dumps(row(8, 4, 0.1, num_warps=None)), "it is not a state update"),
    ],
)
def test_a_line_that_is_no_time_is_counted_with_its_reason(
    tmp_path: Path, line: str, why: str
) -> None:
    path = times(tmp_path / "a.jsonl", row(8, 4, 0.02))
    path.write_text(path.read_text() + line + "\n")
    found = StateUpdateTimes().read(path)
    assert len(found.rows) == 1
    ((told, numbers),) = found.bad.items()
    assert told.startswith(why)
    assert numbers == [3]


def test_a_run_that_ends_writes_no_form_of_reported_times() -> None:
    forms = api.forms_of("triton")
    assert "vllm-moe" in forms
    assert not {"vllm-ssu", "flashinfer", "flashinfer-json"} & set(forms)
