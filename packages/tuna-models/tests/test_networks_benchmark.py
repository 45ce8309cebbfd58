"""Rows of `scripts/bench networks`: ratios, means, the worst, and which are measured again."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest

from benchmarks.network_rows import Row, append, means, read, table, worst
from benchmarks.network_table import EXPORTED, NETWORKS, TRAINED
from benchmarks.wheel_models import TRAINED as IN_WHEELS
from benchmarks.wheels import largest_error


def row(kind: str = "fp32", threads: int = 2, **fields: Any) -> Row:
    shares = {"onnxruntime": 0.5, "openvino_f32": 0.8, "openvino": 1.6}
    return Row(
        **{
            "network": "unet",
            "type": kind,
            "threads": threads,
            "commit": "abc",
            "shares": shares,
            **fields,
        }
    )


def test_a_ratio_is_of_the_fastest_peer_that_is_as_exact() -> None:
    assert [row(kind).ratio for kind in ("fp32", "bf16", "int8")] == [0.8, 1.6, 1.6]
    assert row("fp32").as_they_come == 1.6
    assert row(shares={}).ratio is None


def test_means_are_geometric_and_leave_refusals_out() -> None:
    rows = [row(), row(shares={"onnxruntime": 0.2}), row(shares={}, refused="no")]
    assert means(rows)["geometric mean, fp32, 2 threads (2)"] == pytest.approx(0.4)


def test_the_table_names_refusals_and_the_functions_of_slow_networks() -> None:
    rows = [
        row(refused="It has operators.", shares={}),
        row("bf16", functions=[("task take", 0.4, "LLVM finds no vectors")]),
        row(threads=1, functions=[("task fast", 0.4, "a kernel")]),
    ]
    text = table(rows)
    assert "| unet | fp32 | 2 | refused: It has operators. |" in text
    assert "40.0 % task take: LLVM finds no vectors" in text
    assert "task fast" not in text
    assert [each.ratio for each in worst(rows)] == [1.6, 0.8]


def test_a_row_is_found_again_by_its_commit(tmp_path: Path) -> None:
    path, first = tmp_path / "rows.jsonl", row(functions=[["task", 0.5, "why"]])
    assert read(path) == {}
    append(path, row(commit="old"))
    append(path, first)
    found = read(path)
    assert found[first.key] == first
    assert row("int8").key not in found


def test_an_error_is_relative_and_infinite_where_nan_is_elsewhere() -> None:
    right = [np.array([4.0, np.nan], np.float32)]
    assert largest_error([np.array([3.0, np.nan], np.float32)], right) == 0.25
    assert largest_error([np.array([np.nan, 4.0], np.float32)], right) == float("inf")
    assert row(errors={"tuna": 1e-3, "openvino_f32": 1e-6}).is_wrong
    assert not row(errors={"tuna": 1e-3, "openvino_f32": 1e-3}).is_wrong
    assert row(errors={"tuna": float("nan")}).is_wrong


def test_each_network_is_made_somewhere() -> None:
    assert len(NETWORKS) == len(EXPORTED) + len(TRAINED) > 24
    assert TRAINED.keys() <= IN_WHEELS.keys()
    assert sum(each.quick for each in NETWORKS.values()) == 12
