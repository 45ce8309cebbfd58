"""Shapes and types of an ONNX graph's values, inferred; a contradiction names its operator. Imports
onnx."""

from __future__ import annotations

import math
import re
from collections.abc import Sequence
from typing import Any

import numpy as np
import onnx
from onnx import helper, numpy_helper

from tuna.common.messages import one_line
from tuna_models.names import quoted
from tuna_models.refusals import REASON_CHARS, Refusal

#: The reason in a text of onnx's
_FAULT = re.compile(r"\(op_type:[^,]*, node name: .*?\): (?:\[\w+\] )?([^\n]*)", re.DOTALL)
#: A type of another width than those that ONNX defines for an operator, which may well be computed:
#: fp16 of Celu, bytes as indices
_OTHER_WIDTH = re.compile(r"has unsupported type: tensor\((b?float16|double|u?int\d+)\)")
#: How a contradiction inside of an operator begins, also inside of another one's definition
_INSIDE = "Inference error(s)"
#: What onnx alone refuses: a convolution with negative padding crops its input
_CROPPED = "pads must not contain negative values"
#: Parts of onnx's reasons, and what takes their place
_WORDS = tuple(
    (re.compile(pattern), words)
    for pattern, words in (
        (r"(\w+) typestr: \w+, has unsupported type: (.*)", r"its input \1 cannot be a \2"),
        (r"(\w+) has inconsistent type (.*)", r"its input \1 is a \2, unlike the others"),
        (
            r"indices must be in \[-rank, rank-1\]",
            "it has a constant index beyond the end of its input",
        ),
        (r" in node \w+ \(.*\)", ""),
        (r"[\s.]+$", ""),
    )
)
_ADVICE = "ONNX does not define that: correct it where the model is exported"
#: Most values of a constant whose values take part in the inference of shapes
_LARGEST = 1 << 12
#: Values of an attribute that are shown
_SHOWN = 8


def inferred(model: Any, *, strict: bool = False) -> Any:
    """The model without large weights and with the types and shapes of its values, as far as they
    follow; raises Refusal with an operator of which they contradict each other, `strict` also where
    they are not what the operator takes.

    With `strict` there are no outputs, whose declared types tools leave as they were before a
    change.
    """
    light = without_weights(model)
    if strict:
        del light.graph.output[:]
    try:
        return _inferred(light, strict, strict)
    except Exception as error:  # onnx and protobuf each have their own
        failed, types = error, strict and not _OTHER_WIDTH.search(str(error))
    if strict and not types:
        try:
            return _inferred(light, strict, types)
        except Exception as error:  # as above
            failed = error
    # onnx's own definition of an operator is not strict
    if _CROPPED in str(failed) or str(failed).count(_INSIDE) > 1:
        return inferred(model)
    raise _refusal(str(failed), light, strict, types) from failed


def _inferred(light: Any, strict: bool, types: bool) -> Any:
    infer = onnx.shape_inference.infer_shapes
    return infer(light, check_type=types, strict_mode=strict, data_prop=True)


def _refusal(text: str, light: Any, strict: bool, types: bool) -> Refusal:
    """The refusal of the first operator with which inference fails, found by halving the graph."""
    nodes = list(light.graph.node)
    good, bad = 0, max(len(nodes), 1)
    while bad - good > 1:
        part = (good + bad) // 2
        del light.graph.node[:], light.graph.output[:]
        light.graph.node.extend(nodes[:part])
        try:
            _inferred(light, strict, types)
            good = part
        except Exception as error:  # as above
            bad, text = part, str(error)
    del light.graph.node[:], light.graph.output[:]
    light.graph.node.extend(nodes[:good])
    fault = _FAULT.search(text)
    reason = fault.group(1) if fault else text.rpartition("] ")[2]
    for pattern, words in _WORDS:
        reason = pattern.sub(words, reason)
    reason = one_line(reason, REASON_CHARS) or "its types contradict each other"
    if re.match("[A-Z][a-z]", reason):
        reason = reason[0].lower() + reason[1:]
    try:
        node, known = nodes[bad - 1], _inferred(light, False, False).graph
    except Exception:  # as above: it is none of the operators
        return Refusal(f"its inputs and constants contradict each other: {reason}", _ADVICE)
    return Refusal.of(node, f"{reason}; {described(node, known)}", _ADVICE)


def without_weights(model: Any) -> Any:
    """The model with large constants as inputs, because copying their values takes time."""
    # before version 4 of the format onnx infers nothing from constants that are no inputs
    version = max(model.ir_version, 4)
    light = type(model)(ir_version=version, opset_import=model.opset_import)
    graph, given = model.graph, {value.name for value in model.graph.input}
    light.graph.name = graph.name
    for name in ("node", "input", "value_info"):
        getattr(light.graph, name).extend(getattr(graph, name))
    constants = {tensor.name for tensor in graph.initializer}
    light.graph.output.extend(value for value in graph.output if value.name not in constants)
    for tensor in graph.initializer:
        if math.prod(tensor.dims) <= _LARGEST:
            light.graph.initializer.append(tensor)
        elif tensor.name not in given:
            light.graph.input.append(
                helper.make_tensor_value_info(tensor.name, tensor.data_type, tensor.dims)
            )
    return light


def described(node: Any, graph: Any) -> str:
    """The inputs and attributes of an operator of a graph with inferred types, for messages."""
    types = {value.name: value.type.tensor_type for value in (*graph.input, *graph.value_info)}
    weights = {tensor.name: tensor for tensor in graph.initializer}
    parts = []
    for name in filter(None, node.input):
        values = ""
        if name in weights:
            kind, shape = weights[name].data_type, [*weights[name].dims]
            if kind == onnx.TensorProto.INT64 and np.prod(shape, dtype=np.int64) <= _SHOWN:
                values = f" of {numpy_helper.to_array(weights[name]).tolist()}"
        elif name in types and types[name].HasField("shape"):
            kind = types[name].elem_type
            shape = [each.dim_value or each.dim_param or "?" for each in types[name].shape.dim]
        else:
            kind, shape = types[name].elem_type if name in types else 0, ["?"]
        word = onnx.TensorProto.DataType.Name(kind).lower() if kind else ""
        parts.append(f"{quoted(name)} {word}[{','.join(map(str, shape))}]{values}")
    inputs = f"its inputs are {', '.join(parts)}" if parts else "it has no inputs"
    attributes = ", ".join(
        f"{each.name}={_shown(helper.get_attribute_value(each))}"
        for each in node.attribute
        if not each.ref_attr_name and not each.HasField("g") and not each.HasField("t")
    )
    return one_line(f"{inputs}; {attributes}" if attributes else inputs, 2 * REASON_CHARS)


def _shown(value: Any) -> str:
    if isinstance(value, bytes):
        return quoted(value.decode(errors="replace"))
    if isinstance(value, Sequence) and not isinstance(value, str):
        more = ",..." if len(value) > _SHOWN else ""
        return f"[{','.join(_shown(each) for each in value[:_SHOWN])}{more}]"
    return f"{value:g}" if isinstance(value, float) else str(value)
