"""Writes the quantised operators of onnxruntime's own domain as those of ONNX.

`onnxruntime.quantization` makes them in its format QOperator, beside QLinearConv and QLinearMatMul:
an operator on real values, with what it reads and writes quantised. In the format QDQ the same
model has that operator between DequantizeLinear and QuantizeLinear, and so it is written here. The
definitions are in onnxruntime's ContribOperators.md.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from typing import Any

from onnx import helper

from tuna.common.messages import counted
from tuna_models.reading.onnx_files import QOPERATORS, QOPERATORS_DOMAIN
from tuna_models.refusals import CHANGE_HINT, Refusal


def written_out(model: Any) -> Any:
    """The model with ONNX's operators in the place of onnxruntime's quantised ones; those with
    attributes that ONNX's have not are left."""
    if not any(map(_is_known, model.graph.node)):
        return model
    copy, nodes = type(model)(), list[Any]()
    copy.CopyFrom(model)
    for node in model.graph.node:
        try:
            nodes += _WRITERS[node.op_type](node) if _is_known(node) else [node]
        except (IndexError, ValueError):
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


def _dequantised(prefix: str, given: Sequence[str], axis: int = 1) -> tuple[str, list[Any]]:
    """The name of real values, and the operator that makes them."""
    name = f"{prefix}/{given[0]}"
    return name, [helper.make_node("DequantizeLinear", list(given), [name], axis=axis)]


def _of(operator: str, tensors: int) -> Callable[[Any], list[Any]]:
    """An operator of so many tensors, each with scale and zero point; the answer's follow."""

    def write(node: Any) -> list[Any]:
        prefix, nodes, names = node.output[0], list[Any](), list[str]()
        for place in range(tensors):
            name, made = _dequantised(f"{prefix}/{place}", node.input[3 * place : 3 * place + 3])
            names.append(name)
            nodes += made
        real = helper.make_node(operator, names, [f"{prefix}/real"])
        real.attribute.extend(each for each in node.attribute if each.name != "channels_last")
        return [*nodes, real, *_rounded(node, f"{prefix}/real", node.input[3 * tensors :])]

    return write


def _rounded(node: Any, real: str, given: Sequence[str]) -> Iterator[Any]:
    yield helper.make_node("QuantizeLinear", [real, *given], node.output)


def _concatenation(node: Any) -> list[Any]:
    """Scale and zero point of the answer come first."""
    prefix, nodes, names = node.output[0], list[Any](), list[str]()
    for place in range(2, len(node.input), 3):
        name, made = _dequantised(f"{prefix}/{place}", node.input[place : place + 3])
        names.append(name)
        nodes += made
    real = helper.make_node("Concat", names, [f"{prefix}/real"])
    real.attribute.extend(node.attribute)
    return [*nodes, real, *_rounded(node, f"{prefix}/real", node.input[:2])]


def _product(node: Any) -> list[Any]:
    """The bias are whole numbers on the grid of the products; without a scale of the answer it is
    real."""
    prefix, given = node.output[0], [*node.input, "", "", ""]
    attributes = {each.name: each for each in node.attribute}
    transposed = bool(attributes["transB"].i) if "transB" in attributes else False
    a, nodes = _dequantised(f"{prefix}/a", given[:3])
    b, made = _dequantised(f"{prefix}/b", given[3:6], axis=0 if transposed else 1)
    nodes, names = [*nodes, *made], [a, b]
    if given[6]:
        nodes.append(helper.make_node("Mul", [given[1], given[4]], [f"{prefix}/scale"]))
        c, made = _dequantised(f"{prefix}/c", [given[6], f"{prefix}/scale"], axis=0)
        nodes, names = [*nodes, *made], [*names, c]
    whole = bool(given[7])
    output = [f"{prefix}/real"] if whole else list(node.output)
    gemm = helper.make_node("Gemm", names, output)
    gemm.attribute.extend(each for name, each in attributes.items() if name.startswith("trans"))
    return [*nodes, gemm, *(_rounded(node, output[0], given[7:9]) if whole else ())]


def _renamed(node: Any) -> list[Any]:
    copy = type(node)()
    copy.CopyFrom(node)
    copy.domain = ""
    return [copy]


_WRITERS: dict[str, Callable[[Any], list[Any]]] = {
    "QLinearAdd": _of("Add", 2),
    "QLinearMul": _of("Mul", 2),
    "QLinearSigmoid": _of("Sigmoid", 1),
    "QLinearLeakyRelu": _of("LeakyRelu", 1),
    "QLinearAveragePool": _of("AveragePool", 1),
    "QLinearGlobalAveragePool": _of("GlobalAveragePool", 1),
    "QLinearConcat": _concatenation,
    "QGemm": _product,
    "QuantizeLinear": _renamed,
    "DequantizeLinear": _renamed,
}
assert set(_WRITERS) == QOPERATORS
