"""`tuna model check`: all that is in the way of a model's file, and what has no kernel."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import onnx
import pytest
from command_lines import Ended
from nets import Net, residual
from onnx import TensorProto, helper, numpy_helper
from quantised_nets import Quantised

from tuna_models import child
from tuna_models.child_answers import FileCheck, Roofline

TARGET = '{"kind": "llvm", "mcpu": "x86-64-v3", "num-cores": 2}'


@pytest.fixture
def obstructed(tmp_path: Path) -> Path:
    """A file with an open batch, and six operators that cannot be imported, two in a row."""
    scales = [
        numpy_helper.from_array(np.array([1, 1, scale, scale], np.float32), f"x{scale}")
        for scale in (1.3, 1.25)
    ]
    resize = {"mode": "linear", "coordinate_transformation_mode": "align_corners"}
    nodes = [
        helper.make_node("Mystery", ["x"], ["a"], name="first", domain="own"),
        helper.make_node("Mystery", ["a"], ["b"], name="second", domain="own"),
        helper.make_node("NonZero", ["x"], ["c"], name="places"),
        helper.make_node("Cast", ["x"], ["d"], name="smaller", to=TensorProto.FLOAT8E5M2),
        helper.make_node("Reshape", ["x", "sizes"], ["e"], name="flat"),
        helper.make_node("Resize", ["x", "", "x1.3"], ["f"], name="larger", **resize),
        helper.make_node("Resize", ["f", "", "x1.25"], ["g"], name="largest", **resize),
    ]
    inputs = [
        helper.make_tensor_value_info("x", TensorProto.FLOAT, ["batch", 3, 8, 8]),
        helper.make_tensor_value_info("sizes", TensorProto.INT64, [2]),
    ]
    outputs = [helper.make_tensor_value_info(name, TensorProto.UNDEFINED, None) for name in "bcdeg"]
    graph = helper.make_graph(nodes, "net", inputs, outputs, scales)
    opsets = [helper.make_opsetid("", 20), helper.make_opsetid("own", 1)]
    path = tmp_path / "net.onnx"
    onnx.save(helper.make_model(graph, opset_imports=opsets), path)
    return path


def test_all_that_is_in_the_way_is_named_at_once(obstructed: Path) -> None:
    verdict = child.check_file(asked={"path": str(obstructed), "target": TARGET})
    assert verdict["assumed"] == "--shape batch=1"
    assert [(each["operator"], each["node"]) for each in verdict["obstacles"]] == [
        ("own.Mystery", "first"),
        ("own.Mystery", "second"),
        ("", "x"),
        ("Cast", "smaller"),
        ("NonZero", "places"),
        ("Reshape", "flat"),
        ("Resize", "larger"),
        ("Resize", "largest"),
    ]
    _, _, batch, _, places, flat, larger, _ = verdict["obstacles"]
    assert batch["hint"] == "give them: --shape batch=N; --batch N is the first of every input"
    assert (places["hint"], flat["hint"]) == (
        "",
        "give them, if they are always the same: --value sizes=N,N",
    )
    assert larger["reason"].startswith(
        "with align_corners and a scale of 1.3, which makes no whole"
    )


def test_an_open_batch_is_taken_for_one_to_find_the_rest(tmp_path: Path) -> None:
    model, path = conv_of_doubles(), tmp_path / "net.onnx"
    model.graph.input[0].type.tensor_type.shape.dim[0].dim_param = "n"
    onnx.save(model, path)
    found = child.check_file(asked={"path": str(path), "target": TARGET})
    assert [each["reason"] for each in found["obstacles"]] == ["open extents: n,16,8,8"]
    (given,) = found["inputs"]
    assert (found["assumed"], given["shape"]) == ("--shape n=1", (1, 16, 8, 8))
    (plain,) = found["without_kernel"]
    assert (plain["count"], plain["reason"]) == (
        1,
        "no kernel for conv2d of 1x16x8x8 and 32x16x3x3: its weights are float64",
    )
    assert 0.5 < plain["share"] <= 1


def gates() -> Any:
    """A gate for each channel of quantised tensors, as onnxruntime writes it."""
    net = Quantised((1, 16, 7, 7), 13)
    y = net.rounded(net.quantised_conv(net.rounded("x", 0.03), 32, 16), 0.04)
    gate = net.rounded(net.add("GlobalAveragePool", y), 0.01)
    gate = net.add("Sigmoid", net.rounded(net.quantised_conv(gate, 32, size=1), 0.02))
    y = net.rounded(net.add("Mul", y, net.rounded(gate, 1 / 255, 0)), 0.02)
    return net.model(net.add("GlobalAveragePool", net.quantised_conv(y, 16, 32)))


def test_what_runs_as_scalars_is_named_and_shown_of_an_import(
    type_in: Callable[..., Ended], tmp_path: Path
) -> None:
    """A row of 7 values is no vector, which the quantisation of the input is."""
    path = tmp_path / "net.onnx"
    onnx.save(gates(), path)
    (row,) = child.check_file(asked={"path": str(path), "target": TARGET})["without_kernel"]
    assert row["task"].startswith("task fused_divide_tir_round")
    assert row["scalars"]
    assert "LLVM finds no vectors" in row["reason"]
    onnx.save(conv_of_doubles(), path)
    assert type_in("tuna", "model", "import", "net", path).code == 0
    shown = type_in("tuna", "model", "show", "net").out
    assert "no kernel for conv2d of 1x16x8x8 and 32x16x3x3: its weights are float64" in shown
    (row,) = json.loads(type_in("tuna", "model", "show", "net", "--json").out)["without_kernel"]
    assert (row["count"], 0.5 < row["share"] <= 1) == (1, True)


def test_a_task_is_compared_with_the_peak_that_bounds_it(tmp_path: Path) -> None:
    onnx.save(residual(), tmp_path / "net.onnx")
    asked = {"path": str(tmp_path / "net.onnx"), "target": TARGET}
    check = FileCheck.model_validate(child.check_file(asked=asked))
    cores = [entry.task for entry in check.tasks if entry.task.core is not None]
    assert [check.rooflines[task.label].arithmetic for task in cores] == [
        task.core.flops for task in cores if task.core is not None
    ]
    assert check.rooflines.keys() == {entry.task.label for entry in check.tasks}
    assert Roofline(arithmetic=2e9, memory=1e9).said(10.0, 400.0) == "50% of arithmetic"
    assert Roofline(arithmetic=2e9, memory=4e9).said(10.0, 400.0) == "100% of memory"


def conv_of_doubles() -> Any:
    net = Net((1, 16, 8, 8), kind=np.float64)
    return net.model(net.relu(net.conv("x", 16, 32, 3, norm=False)))


def test_a_check_stores_nothing_and_needs_no_database(
    type_in: Callable[..., Ended],
    obstructed: Path,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    onnx.save(residual(), tmp_path / "good.onnx")
    home, before = tmp_path / "absent", sorted(tmp_path.iterdir())
    monkeypatch.setenv("TUNA_HOME", str(home))
    ended = type_in("tuna", "model", "check", tmp_path / "good.onnx", "--json")
    document = json.loads(ended.out)
    assert (ended.code, document["refused"], document["without_kernel"]) == (0, [], [])
    assert sum(task["count"] for task in document["tasks"]) == 10
    refused = type_in("tuna", "model", "check", obstructed)
    assert refused.code == 2
    assert "- own.Mystery (2: first, second): it cannot be imported\n" in refused.out
    absent = type_in("tuna", "model", "check", tmp_path / "net.onx")
    assert (absent.code, "did you mean .onnx?" in absent.err) == (2, True)
    assert sorted(tmp_path.iterdir()) == before
