"""Constants of types that are no tensors' here, such as int4: decoded at import, ignored where
nobody reads them, or named; scales of blocks, and of shapes that say nothing."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from onnx import TensorProto, helper, numpy_helper
from onnx.reference import ReferenceEvaluator
from test_operators import answers, model

from tuna.errors import BadInput
from tuna_models.reading import importer

RANDOM = np.random.default_rng(0)
#: Opset and limits of values by type.
FEW_BITS = {"INT4": (21, -8, 7), "UINT4": (21, 0, 15), "INT2": (25, -2, 1), "UINT2": (25, 0, 3)}


def product(kind: str, scale: tuple[int, ...], **attributes: int) -> tuple[Any, dict[str, Any]]:
    """A product with weights of few bits, and such a constant that nobody reads."""
    opset, low, high = FEW_BITS[kind]

    def tensor(name: str, shape: tuple[int, ...]) -> Any:
        values = RANDOM.integers(low, high, shape, endpoint=True)
        return helper.make_tensor(name, getattr(TensorProto, kind), shape, values.reshape(-1))

    inputs = {"x": RANDOM.normal(size=(3, 40)).astype(np.float32)}
    nodes = [
        helper.make_node("DequantizeLinear", ["w", "scale", "zero"], ["real"], **attributes),
        helper.make_node("MatMul", ["x", "real"], ["y"]),
    ]
    scales = RANDOM.uniform(0.1, 1.0, scale).astype(np.float32)
    made = model(nodes, inputs, ["y"], {"scale": scales}, opset)
    made.graph.initializer.extend(
        [tensor("w", (40, 16)), tensor("zero", scale), tensor("no", (3,))]
    )
    return made, inputs


@pytest.mark.parametrize("kind", FEW_BITS)
@pytest.mark.parametrize(
    ("scale", "attributes"),
    [((), {}), ((16,), {"axis": 1}), ((3, 16), {"axis": 0, "block_size": 16})],
    ids=["one", "columns", "blocks"],
)
def test_weights_of_few_bits_are_decoded_at_import(
    kind: str, scale: tuple[int, ...], attributes: dict[str, int]
) -> None:
    made, inputs = product(kind, scale, **attributes)
    (right,) = ReferenceEvaluator(made).run(None, inputs)
    (found,) = answers(made, inputs)
    assert np.abs(found - right).max() < 1e-5 * np.abs(right).max()


def test_a_constant_of_few_bits_that_an_operator_reads_is_named() -> None:
    made, _ = product("INT4", ())
    made.graph.input.append(helper.make_tensor_value_info("scale", TensorProto.FLOAT, []))
    del made.graph.initializer[0]  # the scale
    with pytest.raises(BadInput) as refused:
        importer.to_relax(made, "net")
    assert "DequantizeLinear (real) reads the constant w of type int4;" in str(refused.value)
    assert "int8" in refused.value.hint


def test_dequantisation_has_blocks_along_the_one_axis_of_a_tensor() -> None:
    x = {"x": np.arange(1, 8, dtype=np.int8)}
    scales = np.array([1, 10, 100, 1000], np.float32)
    node = helper.make_node("DequantizeLinear", ["x", "scale"], ["y"], axis=0, block_size=2)
    (found,) = answers(model([node], x, ["y"], {"scale": scales}, 21), x)
    assert found.tolist() == [1, 2, 30, 40, 500, 600, 7000]


@pytest.mark.parametrize(
    ("scale", "attributes", "why"),
    [
        ((16, 1, 1), {"axis": 0}, r"the shape \[16, 1, 1\], .* each of the 16 places of axis 0"),
        ((8,), {"axis": 1}, r"the shape \[8\], .* each of the 4 places of axis 1"),
        ((5, 4, 3, 3), {"axis": 0, "block_size": 8}, "each block of 8 of the 16 places of axis 0"),
    ],
    ids=["rank", "row", "blocks"],
)
@pytest.mark.parametrize("operator", ["DequantizeLinear", "QuantizeLinear"])
def test_a_scale_whose_shape_says_nothing_is_refused_with_the_reason(
    operator: str, scale: tuple[int, ...], attributes: dict[str, int], why: str
) -> None:
    kind = np.int8 if operator == "DequantizeLinear" else np.float32
    node = helper.make_node(operator, ["x", "scale"], ["y"], name="weights", **attributes)
    constants = {"scale": np.ones(scale, np.float32)}
    graph = helper.make_graph(
        [node],
        "net",
        [
            helper.make_tensor_value_info(
                "x", helper.np_dtype_to_tensor_dtype(np.dtype(kind)), (16, 4, 3, 3)
            )
        ],
        [helper.make_tensor_value_info("y", TensorProto.UNDEFINED, None)],
        [numpy_helper.from_array(value, name) for name, value in constants.items()],
    )
    made = helper.make_model(graph, opset_imports=[helper.make_opsetid("", 21)], ir_version=10)
    with pytest.raises(BadInput, match=rf"the operator {operator} \(weights\): .*{why}"):
        importer.to_relax(made, "net")
