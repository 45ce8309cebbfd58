"""Functions of one tensor of bytes between two roundings are tables."""

from __future__ import annotations

from typing import Any

import numpy as np
import onnx
import pytest
import tvm
from compiled import HERE, TARGET, planned, run
from quantised_nets import Quantised
from tvm.target import codegen

from tuna.libraries.tvm.kernels import machine
from tuna.libraries.tvm.kernels.look_up import LOOK_UPS
from tuna_models.compiler import byte_functions, graph, integer_finder
from tuna_models.compiler.integer_groups import Table
from tuna_models.reading import importer, onnx_reference

#: Instructions that this machine has, and none
_FEATURES = {str(name) for name in codegen.llvm_get_cpu_features(tvm.target.Target(HERE))}
ROWS = [*(row for row in LOOK_UPS if row.feature in _FEATURES), None]
#: Real values of the bytes that the functions are computed of
_SCALE, _ZERO = 0.0371, 101


def _silu(net: Quantised, x: str) -> str:
    gate = net.rounded(net.add("Sigmoid", x), 1 / 255, -128 if net.byte is np.int8 else 0)
    return net.add("Mul", x, gate)


def _hard_swish(net: Quantised, x: str) -> str:
    gate = net.add("HardSigmoid", x, alpha=1 / 6, beta=0.5)
    return net.add("Mul", net.rounded(gate, 1 / 255, 0), x)


def _hard_swish_in_steps(net: Quantised, x: str) -> str:
    """As networks have it whose exporter writes out each step, and each is quantised."""
    y = net.rounded(net.add("Add", x, net.constant(3.0)), 0.04, 90)
    y = net.rounded(net.add("Clip", y, net.constant(0.0), net.constant(6.0)), 6 / 255, 0)
    y = net.rounded(net.add("Mul", x, y), 0.2, 20)
    return net.add("Div", y, net.constant(6.0))


FUNCTIONS = {
    "sigmoid": lambda net, x: net.add("Sigmoid", x),
    "tanh": lambda net, x: net.add("Tanh", x),
    "gelu": lambda net, x: net.gelu(x),
    "silu": _silu,
    "hard swish": _hard_swish,
    "hard swish in steps": _hard_swish_in_steps,
    "leaky": lambda net, x: net.add("LeakyRelu", x, alpha=0.1),
    "another scale": lambda net, x: x,
}


def _model(function: Any, byte: Any = np.uint8) -> Any:
    """The bytes of a function of all bytes."""
    net = Quantised((1, 1, 16, 16), 13)
    net.byte = byte
    x = net.rounded("x", _SCALE, _ZERO)
    return net.model(net.rounded(function(net, x), 0.0217, 40))


def _tables(model: Any) -> list[Table]:
    parts = graph.read(importer.to_relax(model, "net"))
    return integer_finder.find(parts, 16, lambda _: "").tables


@pytest.mark.parametrize("name", FUNCTIONS)
def test_table_has_the_byte_of_the_reference_for_all_bytes(name: str) -> None:
    model = _model(FUNCTIONS[name])
    *_, last = _tables(model)
    real = ((np.arange(256) - _ZERO) * np.float32(_SCALE)).astype(np.float32)
    (right,) = onnx_reference.run(model, {"x": real.reshape(1, 1, 16, 16)})
    steps = np.rint(right.reshape(-1) / 0.0217) + 40
    assert last.entries.tolist() == steps.tolist()


def test_functions_before_a_table_are_part_of_it_and_are_not_computed() -> None:
    net = Quantised((1, 16, 4, 4), 13)
    net.byte = np.int8
    y = net.rounded(net.quantised_conv(net.rounded("x", 0.03, 0), 16), 0.04, 5)
    model = net.model(net.rounded(_silu(net, y), 0.03, -99))
    assert len(_tables(model)) == 2
    calls = planned(model).calls
    assert calls["byte_table"] == 1
    assert not any("sigmoid" in name for name in calls)


@pytest.mark.parametrize("second", ["y", "z"])
def test_operator_on_two_tensors_or_on_values_by_channel_is_no_table(second: str) -> None:
    net = Quantised((1, 16, 4, 4), 13)
    x = net.rounded("x", 0.03)
    by_channel = net.constant(np.linspace(0.5, 1, 16).reshape(1, 16, 1, 1))
    other = net.rounded("y", 0.04) if second == "y" else by_channel
    inputs = [
        (name, onnx.TensorProto.FLOAT, net.shape) for name in {"x", "x" if second == "z" else "y"}
    ]
    model = net.model(net.rounded(net.add("Mul", x, other), 0.05), inputs=inputs)
    assert not _tables(model)


@pytest.mark.parametrize("row", ROWS, ids=lambda row: getattr(row, "feature", "none"))
@pytest.mark.parametrize("extents", [(1, 2, 5, 5, 16), (3, 5, 7), (64,), (9,)])
def test_table_is_looked_up_by_each_instruction(row: Any, extents: tuple[int, ...]) -> None:
    target = tvm.target.Target(HERE)
    function = byte_functions.table(extents, row)
    random = np.random.default_rng(7)
    x, table = (random.integers(0, 256, size, np.uint8) for size in (extents, 256))
    given = [tvm.runtime.tensor(each) for each in (x, table, np.zeros_like(x))]
    module = tvm.IRModule({"main": function.with_attr("global_symbol", "main")})
    tvm.tirx.build(module, target=target)["main"](*given)
    assert np.array_equal(given[2].numpy(), table[x])


def test_other_processors_have_the_instruction_of_theirs() -> None:
    target = tvm.target.Target(
        {"kind": "llvm", "mtriple": "aarch64-linux-gnu", "mcpu": "neoverse-n1", "num-cores": 4}
    )
    function = byte_functions.table((1, 6, 112, 112, 16), machine.from_target(target).look_up)
    module = tvm.IRModule({"main": function.with_attr("global_symbol", "main")})
    assert "tbl\tv" in tvm.tirx.build(module, target=target).inspect_source("s")


def test_product_of_bytes_is_rounded_as_numpy_rounds_it() -> None:
    """A gate has one value for each channel, as it stands and in blocks of channels."""
    net = Quantised((2, 16, 5, 5), 13)
    x = net.rounded(net.quantised_conv(net.rounded("x", 0.03), 16), 0.0413)
    gate = net.rounded(net.add("GlobalAveragePool", x), 0.0107)
    model = net.model(net.rounded(net.add("Mul", gate, x), 0.0193))
    plan = planned(model, target=TARGET)
    assert plan.calls["byte_product"] == 1
    given = np.random.default_rng(1).normal(size=net.shape).astype(np.float32)
    (right,) = onnx_reference.run(model, {"x": given})
    (answer,) = run(plan, given)
    assert np.abs(answer - right).max() < 1e-6
