"""Obstacles to the import of a folded ONNX graph: types of values, and inputs of operators
whose values have to be known by then. Imports onnx."""

from __future__ import annotations

import functools
import shlex
from collections.abc import Iterable, Iterator, Mapping
from typing import Any

import numpy as np
import onnx
from onnx import defs, numpy_helper

from tuna_models.arguments import TYPES, Obstacles
from tuna_models.child_answers import Obstacle
from tuna_models.names import quoted, title
from tuna_models.reading.bodies import constants_of
from tuna_models.refusals import CHANGE_HINT, Refusal, obstacle

#: Operators by the places of inputs that decide a shape, or that TVM takes as constants alone.
_BY_PLACES: Mapping[tuple[int, ...], str] = {
    (0,): "BlackmanWindow HammingWindow HannWindow ConstantOfShape If NonZero Unique",
    (1,): """
        ReduceL1 ReduceL2 ReduceLogSum ReduceLogSumExp ReduceMax ReduceMean ReduceMin ReduceProd
        ReduceSum ReduceSumSquare Reshape Expand Tile TopK OneHot Squeeze Unsqueeze Split
        SplitToSequence CenterCropPad Trilu CumSum CumProd AffineGrid Upsample SequenceAt
        SequenceErase Compress""",
    (2,): "MaxUnpool",
    (0, 1): "Loop",
    (1, 2): "Col2Im DFT Dropout",
    (1, 3): "STFT",
    (0, 1, 2): "Range",
    (1, 2, 3): "Pad Resize",
    (1, 2, 3, 4): "Slice",
    (0, 1, 2, 3, 4): "MelWeightMatrix NonMaxSuppression",
}
_DECIDING = {name: places for places, names in _BY_PLACES.items() for name in names.split()}
#: Operators by the places of their scales
_SCALES: Mapping[str, tuple[int, ...]] = {
    "QuantizeLinear": (1,),
    "DequantizeLinear": (1,),
    "QLinearConv": (1, 4, 6),
    "QLinearMatMul": (1, 4, 6),
}
#: Operators with a second input that is checked against the shape of the first
_CHECKED = {
    *("Gather", "GatherElements", "GatherND", "ScatterElements", "ScatterND", "CumSum", "PRelu"),
}
#: Most whole numbers, and most others, such as scales, that a hint asks for.
_MAX_WHOLE, _MAX_REAL = 64, 8
#: Most operators with a wrong type that are named.
_MAX_NAMED = 6


def check_scales(model: Any) -> None:
    """Raise Refusal for an operator whose scale is a constant that is not finite, or by which it
    divides, 0."""
    graph = model.graph
    constants = constants_of(graph)
    for node in graph.node:
        for place in _SCALES.get(node.op_type, ()):
            tensor = constants.get(node.input[place]) if place < len(node.input) else None
            if tensor is None:
                continue
            values, word = numpy_helper.to_array(tensor).astype(np.float32), ""
            if not np.isfinite(values).all():
                word = "NaN" if np.isnan(values).any() else "infinite"
            elif node.op_type == "QuantizeLinear" and not values.all():
                word = "0"
            if word:
                raise Refusal.of(
                    node,
                    f"its scale {quoted(node.input[place])} is {word}",
                    "quantise the model again, on inputs that are finite and not all 0",
                )


def check_values(model: Any, inferred: Any) -> None:
    """Raise Refusal for constants that decide places beyond the end of a tensor, and a slope that
    does not broadcast; `inferred` is a graph with all shapes."""
    shapes = {
        value.name: [each.dim_value for each in value.type.tensor_type.shape.dim]
        for value in (*inferred.input, *inferred.value_info)
    }
    shapes |= {tensor.name: list(tensor.dims) for tensor in model.graph.initializer}
    constants = {tensor.name: tensor for tensor in model.graph.initializer}
    for node in model.graph.node:
        if node.op_type not in _CHECKED or any(name not in shapes for name in node.input[:2]):
            continue
        shape, other = (shapes[name] for name in node.input[:2])
        axis = next((each.i for each in node.attribute if each.name == "axis"), 0)
        if node.op_type == "PRelu":
            if len(other) > len(shape) or any(
                slope not in (1, extent)
                for slope, extent in zip(other[::-1], shape[::-1], strict=False)
            ):
                why = f"its slope of the shape {other} does not broadcast to {shape}"
                raise Refusal.of(node, why, CHANGE_HINT)
        elif node.input[1] in constants:
            places = numpy_helper.to_array(constants[node.input[1]])
            what, size = "axis", np.array(len(shape))
            if node.op_type in ("GatherND", "ScatterND"):
                first = next((each.i for each in node.attribute if each.name == "batch_dims"), 0)
                what, size = "index", np.array(shape[first:][: places.shape[-1]])
            elif node.op_type != "CumSum":
                what, size = "index", np.array(shape[axis])
            beyond = places[(places < -size) | (places >= size)]
            if beyond.size:
                why = f"its {what} {beyond.flat[0]} is beyond the end of {size}"
                raise Refusal.of(node, why, CHANGE_HINT)


def refuse_undecided(name: str, model: Any) -> None:
    """Raise BadInput for operators of a folded model with inputs whose values are not known.

    The hint asks for the values of the model's inputs that decide them, if these are few.
    """
    graph = model.graph
    known = {tensor.name for tensor in graph.initializer}
    known |= {node.output[0] for node in graph.node if node.op_type == "Constant"}
    makers = {output: node for node in graph.node for output in node.output}
    opset = next((entry.version for entry in model.opset_import if not entry.domain), 1)
    sizes = {value.name: value.type.tensor_type for value in graph.input}
    places: dict[str, list[str]] = {}
    obstacles: list[Obstacle] = []
    asked: dict[str, None] = {}
    for node in graph.node:
        for place in _DECIDING.get(node.op_type, ()) if not node.domain else ():
            if place < len(node.input) and node.input[place] and node.input[place] not in known:
                label, argument = node.name or node.output[0], _argument(node.op_type, opset, place)
                places.setdefault(node.op_type, []).append(f"{label}: {argument}")
                sources = dict.fromkeys(_sources(node.input[place], makers, known))
                asked |= sources
                why = f"the value of its {argument} depends on the model's input"
                obstacles.append(obstacle(node, why, _asking(sources, sizes)))
    if not places:
        return
    listed = ", ".join(
        f"{operator} ({', '.join(titles[:6])})" for operator, titles in places.items()
    )
    raise Obstacles(
        f"{name} has operators that need values which depend on the model's input: {listed}.",
        obstacles,
        hint=_asking(asked, sizes),
    )


def _asking(sources: Iterable[str], sizes: Mapping[str, Any]) -> str:
    """The options that give values to inputs, if these are few."""
    askable = [source for source in sources if source in sizes and _few(sizes[source])]
    texts = [shlex.quote(f"{source}={_form(sizes[source])}") for source in askable]
    words = " ".join(f"--value {text}" for text in texts)
    return f"give them, if they are always the same: {words}" if words else ""


def _argument(operator: str, opset: int, place: int) -> str:
    """The name of an input in the operator's definition."""
    inputs = defs.get_schema(operator, opset).inputs
    return str(inputs[min(place, len(inputs) - 1)].name)


def _sources(name: str, makers: Mapping[str, Any], known: set[str]) -> Iterator[str]:
    """Yield the inputs of the model on which a value depends."""
    waiting, seen = [name], {name, *known}
    while waiting:
        value = waiting.pop()
        if value not in makers:
            yield value
            continue
        for read in makers[value].input:
            if read and read not in seen:
                seen.add(read)
                waiting.append(read)


def _few(tensor: Any) -> bool:
    """Whether values of an input can be typed: a few dozen whole numbers, or a few others."""
    count = int(np.prod([extent.dim_value for extent in tensor.shape.dim], dtype=np.int64))
    kind = onnx.helper.tensor_dtype_to_np_dtype(tensor.elem_type).kind
    return count <= (_MAX_WHOLE if kind in "iub" else _MAX_REAL)


def _form(tensor: Any) -> str:
    count = int(np.prod([extent.dim_value for extent in tensor.shape.dim], dtype=np.int64))
    return ",".join(["N"] * count) if count < 4 else "N,N,..."


def refuse_types(name: str, model: Any, inferred: Any) -> None:
    """Raise BadInput for operators that read constants or make values of types that Tuna has not:
    strings, sequences, floats of eight bits and others; `inferred` is a model with all types."""
    constants = {tensor.name: tensor.data_type for tensor in model.graph.initializer}
    graph = inferred.graph
    kinds = {value.name: value.type for value in (*graph.value_info, *graph.output)}
    outputs = {value.name for value in model.graph.output}
    wrong: list[tuple[Any, str]] = []
    for node in model.graph.node:
        for tensor in node.input:
            kind = _tensor_type(constants.get(tensor, 0))
            if kind and kind not in TYPES:
                wrong.append((node, f"reads the constant {tensor} of type {kind}"))
        for output in node.output:
            kind = type_name(kinds[output]) if output in kinds else ""
            # a sequence between operators is a tuple
            if kind and kind not in TYPES and (kind != "sequence" or output in outputs):
                wrong.append((node, f"makes a value of type {kind}"))
    if wrong:
        known = f"it can be {', '.join(TYPES)}"
        listed = "; ".join(f"the operator {title(node)} {why}" for node, why in wrong[:_MAX_NAMED])
        each = [obstacle(node, why, known) for node, why in wrong]
        raise Obstacles(f"{name} cannot be imported: {listed}.", each, hint=known)


def type_name(kind: Any) -> str:
    """NumPy's name of a tensor's type, ONNX's of another; empty where it is not known."""
    if kind.WhichOneof("value") not in (None, "tensor_type"):
        return str(kind.WhichOneof("value")).removesuffix("_type")
    return _tensor_type(kind.tensor_type.elem_type)


@functools.cache
def _tensor_type(number: int) -> str:
    if number == onnx.TensorProto.STRING:
        return "string"
    if number not in onnx.TensorProto.DataType.values():
        return f"{number}, which ONNX does not define"
    return str(onnx.helper.tensor_dtype_to_np_dtype(number)) if number else ""
