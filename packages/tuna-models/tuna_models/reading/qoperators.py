"""Writes the quantised operators of onnxruntime's own domain as those of ONNX, and quantised layers
as real ones.

`onnxruntime.quantization` makes them in its format QOperator, beside QLinearConv and QLinearMatMul:
an operator on real values, with what it reads and writes quantised. In the format QDQ the same
model has that operator between DequantizeLinear and QuantizeLinear, and so it is written here. The
definitions are in onnxruntime's ContribOperators.md.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

from onnx import helper

from tuna.common.messages import counted
from tuna_models.reading.onnx_files import QOPERATORS, QOPERATORS_DOMAIN
from tuna_models.refusals import CHANGE_HINT, Refusal

_Writer = Callable[[Any], list[Any]]


def written_out(model: Any) -> Any:
    """The model with ONNX's operators in the place of onnxruntime's quantised ones; those with
    attributes that ONNX's have not are left."""
    return _replaced(model, lambda node: _WRITERS[node.op_type] if _is_known(node) else None)


def in_real_values(model: Any) -> Any:
    """The model with quantised convolutions and products as their definitions: real ones of real
    values, which are rounded then."""
    return _replaced(model, lambda node: _DEFINITIONS.get(node.op_type))


def _replaced(model: Any, writer_of: Callable[[Any], _Writer | None]) -> Any:
    """A copy of the model with other operators for those that have a writer, itself if none has."""
    writers = list(map(writer_of, model.graph.node))
    if not any(writers):
        return model
    copy, nodes = type(model)(), list[Any]()
    copy.CopyFrom(model)
    for node, write in zip(model.graph.node, writers, strict=True):
        try:
            nodes += [node] if write is None else write(node)
        except IndexError:
            why = f"it has {counted(len(node.input), 'input')}, fewer than it takes"
            raise Refusal.of(node, why, CHANGE_HINT) from None
    del copy.graph.node[:]
    copy.graph.node.extend(nodes)
    return copy


def _is_known(node: Any) -> bool:
    if node.domain != QOPERATORS_DOMAIN or node.op_type not in QOPERATORS:
        return False
    attributes = {each.name: helper.get_attribute_value(each) for each in node.attribute}
    factor = attributes.get("alpha", 1.0) if node.op_type == "QGemm" else 1.0
    return not attributes.get("channels_last") and factor == 1.0


def _real(
    node: Any,
    operator: str,
    tensors: Sequence[Sequence[str]],
    answer: Sequence[str],
    axes: Sequence[int] = (1, 1),
    bias: str = "",
) -> list[Any]:
    """An operator on the real values of `tensors`, each with scale and zero point along its axis,
    whose result is rounded to the grid `answer`; where that is empty, the result is real.

    A bias is whole numbers on the grid of the products of two tensors.
    """
    prefix, nodes, names = node.output[0], list[Any](), list[str]()
    for place, given in enumerate(tensors):
        names.append(f"{prefix}/{place}/{given[0]}")
        axis = axes[place] if place < len(axes) else 1
        nodes.append(helper.make_node("DequantizeLinear", given, names[-1:], axis=axis))
    if bias:
        scale, scales = f"{prefix}/scale", [tensors[0][1], tensors[1][1]]
        names.append(f"{prefix}/{bias}")
        nodes.append(helper.make_node("Mul", scales, [scale]))
        nodes.append(helper.make_node("DequantizeLinear", [bias, scale], names[-1:], axis=0))
    output = [f"{prefix}/real"] if any(answer) else node.output
    real = helper.make_node(operator, names, output)
    real.attribute.extend(each for each in node.attribute if each.name != "channels_last")
    if any(answer):
        return [*nodes, real, helper.make_node("QuantizeLinear", [*output, *answer], node.output)]
    return [*nodes, real]


def _of(operator: str, count: int) -> _Writer:
    """Write an operator of so many tensors, behind which the answer's scale and zero point are."""

    def write(node: Any) -> list[Any]:
        tensors = [node.input[3 * place : 3 * place + 3] for place in range(count)]
        return _real(node, operator, tensors, [node.input[3 * count], *node.input[3 * count + 1 :]])

    return write


def _concatenation(node: Any) -> list[Any]:
    """Write one whose answer's scale and zero point come first."""
    tensors = [node.input[place : place + 3] for place in range(2, len(node.input), 3)]
    return _real(node, "Concat", tensors, node.input[:2])


def _gemm(node: Any) -> list[Any]:
    turned = any(each.name == "transB" and each.i for each in node.attribute)
    bias, *answer = [*node.input[6:], "", "", ""][:3]
    tensors = node.input[:3], node.input[3:6]
    return _real(node, "Gemm", tensors, answer if answer[0] else (), (1, 1 - turned), bias)


def _conv(node: Any) -> list[Any]:
    bias = [*node.input[8:], ""][0]
    tensors = node.input[:3], node.input[3:6]
    return _real(node, "Conv", tensors, node.input[6:8], (1, 0), bias)


def _product(node: Any) -> list[Any]:
    return _real(node, "MatMul", (node.input[:3], node.input[3:6]), node.input[6:8], (-2, -1))


def _renamed(node: Any) -> list[Any]:
    copy = type(node)()
    copy.CopyFrom(node)
    copy.domain = ""
    return [copy]


_WRITERS: dict[str, _Writer] = {
    "QLinearAdd": _of("Add", 2),
    "QLinearMul": _of("Mul", 2),
    "QLinearSigmoid": _of("Sigmoid", 1),
    "QLinearLeakyRelu": _of("LeakyRelu", 1),
    "QLinearAveragePool": _of("AveragePool", 1),
    "QLinearGlobalAveragePool": _of("GlobalAveragePool", 1),
    "QLinearConcat": _concatenation,
    "QGemm": _gemm,
    "QuantizeLinear": _renamed,
    "DequantizeLinear": _renamed,
}
assert set(_WRITERS) == QOPERATORS
_DEFINITIONS: dict[str, _Writer] = {"QLinearConv": _conv, "QLinearMatMul": _product}
