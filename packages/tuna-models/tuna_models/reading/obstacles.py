"""Obstacles to the import of a folded ONNX graph: types of values, and inputs of operators
whose values have to be known by then. Imports onnx."""

from __future__ import annotations

import functools
import math
import shlex
from collections.abc import Iterable, Iterator, Mapping
from typing import Any

import onnx
from onnx import defs

from tuna_models.arguments import TYPES, Obstacles
from tuna_models.child_answers import Obstacle
from tuna_models.names import names_of, title
from tuna_models.reading.fold import Folded
from tuna_models.refusals import obstacle

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
#: Most whole numbers, and most others, such as scales, that a hint asks for.
_MAX_WHOLE, _MAX_REAL = 64, 8
#: Most operators with a wrong type that are named.
_MAX_NAMED = 6


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
                label, argument = names_of(node)[1], _argument(node.op_type, opset, place)
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
    forms = {source: _form(sizes[source]) for source in sources if source in sizes}
    words = " ".join(
        f"--value {shlex.quote(f'{source}={form}')}" for source, form in forms.items() if form
    )
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


def _form(tensor: Any) -> str:
    """The values of an input as they are typed: a few dozen whole numbers, or a few others; empty
    for more."""
    count = math.prod(extent.dim_value for extent in tensor.shape.dim)
    kind = onnx.helper.tensor_dtype_to_np_dtype(tensor.elem_type).kind
    if count > (_MAX_WHOLE if kind in "iub" else _MAX_REAL):
        return ""
    return ",".join(["N"] * count) if count < 4 else "N,N,..."


def refuse_types(name: str, folded: Folded) -> None:
    """Raise BadInput for operators that read constants or make values of types that Tuna has not:
    strings, sequences, floats of eight bits and others."""
    graph = folded.model.graph
    constants = {tensor.name: tensor.data_type for tensor in graph.initializer}
    outputs = {value.name for value in graph.output}
    wrong: list[tuple[Any, str]] = []
    for node in graph.node:
        for tensor in node.input:
            kind = _tensor_type(constants.get(tensor, 0))
            if kind and kind not in TYPES:
                wrong.append((node, f"reads the constant {tensor} of type {kind}"))
        for output in filter(None, node.output):
            kind = type_name(folded.values[output].type)
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
