"""Types and shapes of an operator's outputs, by ONNX's own inference. Imports onnx.

One operator at a time: what it is given has been checked and is of a bounded size, so that nothing
a stranger wrote comes to onnx's inference before its numbers and the sizes before it were checked.
"""

from __future__ import annotations

import math
import re
from collections.abc import Sequence
from functools import cache
from typing import Any

import onnx
from onnx import defs, helper, shape_inference

from tuna.common.messages import one_line
from tuna_models.names import quoted
from tuna_models.reading.known import UNKNOWN, Value
from tuna_models.reading.onnx_files import DYNAMIC_LSTM
from tuna_models.reading.operator_forms import schema_of
from tuna_models.refusals import CHANGE_HINT, REASON_CHARS, Refusal

#: A type of another width than those that ONNX defines for an operator, which may well be computed:
#: fp16 of Celu, bytes as indices
_OTHER_WIDTH = re.compile(r"has unsupported type: tensor\((b?float16|double|u?int\d+)\)")
#: How a contradiction inside of an operator's definition by others begins
_INSIDE = "Inference error(s)"
#: What onnx alone refuses: a convolution with negative padding crops its input
_CROPPED = "pads must not contain negative values"
#: Parts of onnx's reasons, and what takes their place
_WORDS = tuple(
    (re.compile(pattern), words)
    for pattern, words in (
        (r"^\[\w+\] ", ""),
        (r"(\w+) typestr: \w+, has unsupported type: (.*)", r"its input \1 cannot be a \2"),
        (r"(\w+) has inconsistent type (.*)", r"its input \1 is a \2, unlike the others"),
        (r" in node \w+( \(.*\))?", ""),
        (r"[\s.]+$", ""),
    )
)
_ADVICE = "ONNX does not define that: correct it where the model is exported"
#: Most of a number of an operator times an extent, with which onnx computes in 64 bits
_MAX_PRODUCT = 1 << 62
#: Operators whose numbers are extents, or factors of them
_SIZING = {
    *("Tile", "Pad", "Resize", "Upsample", "Range", "OneHot", "TopK", "ConstantOfShape", "Expand"),
    *("Conv", "ConvTranspose", "AveragePool", "LpPool", "MaxPool", "MaxUnpool", "Col2Im", "Split"),
    *("DepthToSpace", "SpaceToDepth", "CenterCropPad", "DFT", "STFT", "Reshape", "AffineGrid"),
}
#: Operators with one output for each of their inputs' types, of which onnx infers none
_SAME = {"MeanVarianceNormalization", "GroupNormalization"}
#: Operators whose output has the values of all their inputs
_OF_SEQUENCES = {
    *("SequenceConstruct", "SequenceInsert", "SequenceErase", "SplitToSequence"),
    "ConcatFromSequence",
}
#: Values of an attribute that are shown
_SHOWN = 8

_Key = tuple[Any, ...]
#: Answers by all that decides them: a model has few different operators.
_ANSWERS: dict[_Key, list[bytes]] = {}
_MAX_ANSWERS = 1 << 14


def answers(node: Any, inputs: Sequence[Value | None], opset: int) -> list[Value]:
    """Infer the outputs of one of ONNX's operators from its inputs; raises Refusal for inputs that
    contradict each other or are not what it takes. Those of an LSTM in bytes are those of the real
    one of as many units, which follow from its first input."""
    if node.op_type == DYNAMIC_LSTM and inputs:
        real = helper.make_node("LSTM", [node.input[0]] * 3, node.output)
        real.attribute.extend(node.attribute)
        node, inputs = real, [inputs[0]] * 3
    if node.op_type in _SAME:
        return [Value(each.text) for each in inputs[:1] if each is not None]
    if node.op_type == "Range":  # some exporters write vectors of one value
        inputs = [
            Value.of_values(each.array().reshape(()))
            if each is not None and each.is_known and each.shape == (1,)
            else each
            for each in inputs
        ]
    data = {
        name: value.data()
        for name, value in zip(node.input, inputs, strict=True)
        if value is not None and value.is_known
    }
    data = {name: tensor for name, tensor in data.items() if tensor is not None}
    attributes = b"".join(each.SerializeToString() for each in node.attribute)
    key = (
        *(node.op_type, opset, attributes, *map(bool, node.output), None),
        *(None if each is None else each.text for each in inputs),
        *(data[name].SerializeToString() if name in data else None for name in node.input),
    )
    if key not in _ANSWERS:
        if len(_ANSWERS) >= _MAX_ANSWERS:
            _ANSWERS.clear()
        _ANSWERS[key] = _inferred(node, inputs, data, opset)
    held = sum(each.size_bytes for each in inputs if each is not None)
    return [
        Value(text, held_bytes=held if node.op_type in _OF_SEQUENCES else 0)
        for text in _ANSWERS[key]
    ]


def _inferred(
    node: Any, inputs: Sequence[Value | None], data: dict[str, Any], opset: int
) -> list[bytes]:
    nothing = [b""] * len(node.output)
    schema = _schema(node.op_type, opset, frozenset(each.name for each in node.attribute))
    if schema is None or any(each is not None and not each.text for each in inputs):
        return nothing
    _check_numbers(node, inputs, data)
    types = {
        name: value.type
        for name, value in zip(node.input, inputs, strict=True)
        if value is not None
    }
    opsets = [helper.make_opsetid("", opset)]
    try:
        made = shape_inference.infer_node_outputs(schema, node, types, data, opset_imports=opsets)
    except Exception as error:  # onnx and protobuf each have their own
        text = str(error)
        if _OTHER_WIDTH.search(text):
            made = _of_other_width(node, types, data, opsets)
        elif _CROPPED in text or _INSIDE in text:
            return nothing
        else:
            raise _refusal(text, node, inputs) from error
    for kind in made.values():
        for extent in kind.tensor_type.shape.dim:
            if extent.dim_value < 0:
                raise Refusal.of(node, f"it has the extent {extent.dim_value}", CHANGE_HINT)
    return [made[name].SerializeToString() if name in made else b"" for name in node.output]


def _of_other_width(
    node: Any, types: dict[str, Any], data: dict[str, Any], opsets: list[Any]
) -> dict[str, Any]:
    """The types of the outputs where ONNX does not define the operator for those of the inputs."""
    inputs = [helper.make_value_info(name, kind) for name, kind in types.items()]
    for name, tensor in data.items():
        data[name] = type(tensor).FromString(tensor.SerializeToString())
        data[name].name = name
    graph = helper.make_graph([node], "one", inputs, [], list(data.values()))
    single = helper.make_model(graph, opset_imports=opsets)
    values = shape_inference.infer_shapes(single).graph.value_info
    return {value.name: value.type for value in values}


@cache
def _schema(operator: str, opset: int, attributes: frozenset[str]) -> Any:
    """The definition of an operator; the newest where that of the opset has not its attributes, or
    the opset has it not; None for another."""
    schema = schema_of(operator, opset)
    if schema is not None and all(
        name in schema.attributes or name.startswith("__") for name in attributes
    ):
        return schema
    return defs.get_schema(operator) if defs.has(operator) else None


def _check_numbers(node: Any, inputs: Sequence[Value | None], data: dict[str, Any]) -> None:
    """Refuse numbers for which the extents of the answer do not fit into 64 bits."""
    if node.op_type not in _SIZING:
        return
    numbers = [number for each in node.attribute for number in (each.i, *each.ints)]
    for value in inputs:
        if value is not None and value.is_known and value.data() is not None:
            array = value.array()
            if array.dtype.kind in "iu":
                numbers += [int(number) for number in array.reshape(-1)]
    largest = max(map(abs, numbers), default=0)
    extents = [extent for value in inputs if value is not None for extent in value.shape or ()]
    if largest * max(extents, default=1) > _MAX_PRODUCT:
        raise Refusal.of(node, f"it has the number {largest}", CHANGE_HINT)


def _refusal(text: str, node: Any, inputs: Sequence[Value | None]) -> Refusal:
    """The refusal of an operator with which inference fails."""
    reason = text.partition("\n")[0]
    for pattern, words in _WORDS:
        reason = pattern.sub(words, reason)
    reason = one_line(reason, REASON_CHARS) or "its types contradict each other"
    if re.match("[A-Z][a-z]", reason):
        reason = reason[0].lower() + reason[1:]
    return Refusal.of(node, f"{reason}; {described(node, inputs)}", _ADVICE)


def described(node: Any, inputs: Sequence[Value | None]) -> str:
    """The inputs and attributes of an operator, for messages."""
    parts = []
    for name, value in zip(node.input, inputs, strict=True):
        if value is None:
            continue
        tensor, values = (value or UNKNOWN).type.tensor_type, ""
        shape: list[Any] = ["?"]
        if tensor.HasField("shape"):
            shape = [each.dim_value or each.dim_param or "?" for each in tensor.shape.dim]
        if value.shape is not None:
            shape = list(value.shape)
            few = value.kind == onnx.TensorProto.INT64 and math.prod(shape) <= _SHOWN
            values = f" of {value.array().tolist()}" if few and value.is_known else ""
        word = onnx.TensorProto.DataType.Name(value.kind).lower() if value.kind else ""
        parts.append(f"{quoted(name)} {word}[{','.join(map(str, shape))}]{values}")
    words = f"its inputs are {', '.join(parts)}" if parts else "it has no inputs"
    attributes = ", ".join(
        f"{each.name}={_shown(helper.get_attribute_value(each))}"
        for each in node.attribute
        if not each.ref_attr_name and not each.HasField("g") and not each.HasField("t")
    )
    return one_line(f"{words}; {attributes}" if attributes else words, 2 * REASON_CHARS)


def _shown(value: Any) -> str:
    if isinstance(value, bytes):
        return quoted(value.decode(errors="replace"))
    if isinstance(value, Sequence) and not isinstance(value, str):
        more = ",..." if len(value) > _SHOWN else ""
        return f"[{','.join(_shown(each) for each in value[:_SHOWN])}{more}]"
    return f"{value:g}" if isinstance(value, float) else str(value)
