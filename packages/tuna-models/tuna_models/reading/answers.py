"""Shapes and types of the answers of ONNX's operators, found without making any. Imports onnx."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import numpy as np
from onnx import TensorProto, helper

from tuna_models.reading import onnx_shapes, sequences, shapes_by_values
from tuna_models.reading.onnx_shapes import Call, Tensor, Unknown
from tuna_models.refusals import Unsupported

#: What rules raise for an operator that is not as ONNX defines it, of which the import speaks.
UNDEFINED = (Unknown, ValueError, LookupError, TypeError, ArithmeticError)
_RULES = onnx_shapes.RULES | shapes_by_values.RULES

_BOOL, _FLOAT, _INT64 = TensorProto.BOOL, TensorProto.FLOAT, TensorProto.INT64
_COMPARISONS = "And Equal Greater GreaterOrEqual IsInf IsNaN Less LessOrEqual Not Or Xor"
_INDICES = "ArgMax ArgMin NonMaxSuppression NonZero SequenceLength Shape Size"


def _like(place: int, otherwise: int = 0) -> Callable[[Call], int]:
    """The type of an input."""

    def kind(call: Call) -> int:
        tensor = call.inputs[place] if place < len(call.inputs) else None
        return otherwise if tensor is None else tensor.kind

    return kind


_like_first = _like(0)


def _named(attribute: str, otherwise: Callable[[Call], int]) -> Callable[[Call], int]:
    """The type that an attribute names."""
    return lambda call: call.attributes.get(attribute) or otherwise(call)


def _always(kind: int) -> Callable[[Call], int]:
    return lambda call: kind


def _of_value(call: Call) -> int:
    value: Any = call.attributes.get("value")
    return _FLOAT if value is None else int(value.data_type)


_FIRST: dict[str, Callable[[Call], int]] = {
    **dict.fromkeys(_COMPARISONS.split(), _always(_BOOL)),
    **dict.fromkeys(_INDICES.split(), _always(_INT64)),
    **dict.fromkeys(("MatMulInteger", "ConvInteger"), _always(TensorProto.INT32)),
    **dict.fromkeys(("QLinearMatMul", "QLinearConv"), _like(7)),
    **dict.fromkeys(("RandomNormal", "RandomUniform"), _named("dtype", _always(_FLOAT))),
    **dict.fromkeys(
        ("EyeLike", "RandomNormalLike", "RandomUniformLike", "Bernoulli"), _named("dtype", _like(0))
    ),
    **dict.fromkeys(
        ("BlackmanWindow", "HammingWindow", "HannWindow", "MelWeightMatrix"),
        _named("output_datatype", _always(_FLOAT)),
    ),
    "Cast": _named("to", _like(0)),
    "CastLike": _like(1),
    "ConstantOfShape": _of_value,
    "DequantizeLinear": _named("output_dtype", _like(1)),
    "DynamicQuantizeLinear": _always(TensorProto.UINT8),
    "OneHot": _like(2),
    "QuantizeLinear": _named("output_dtype", _like(2, TensorProto.UINT8)),
    "Where": _like(1),
}
#: Types of the second output, where it is not that of the first.
_SECOND = {"TopK": _INT64, "MaxPool": _INT64}


def _kind(call: Call) -> int:
    """The type of an operator's first output in ONNX's numbers, 0 if it is not known."""
    return (_FIRST.get(call.operator) or _like_first)(call)


def answer_bytes(node: Any, known: Mapping[str, Any], opset: int) -> int:
    """Bytes of the outputs of an operator on known values, before they are computed; 0 if the
    estimate does not know its shape."""
    inputs = list[Tensor | None]()
    for name in node.input:
        array = np.asarray(known[name]) if name else None
        if array is None or array.dtype.kind in "OUS":
            inputs.append(None)
        else:
            kind = helper.np_dtype_to_tensor_dtype(array.dtype)
            inputs.append(Tensor(kind, array.shape, values=array))
    try:
        return sum(answer.size_bytes for answer in answers_of(Call(node, inputs, opset, {})))
    except (*UNDEFINED, Unsupported):
        return 0


def answers_of(call: Call) -> list[Tensor]:
    """The outputs of an operator by its rule; raises what rules raise."""
    if call.operator not in _RULES:
        return [sequences.RULES[call.operator](call)]
    made, kind = _RULES[call.operator](call), _kind(call)
    if isinstance(made, tuple):
        return [Tensor(kind, made)]
    second = _SECOND.get(call.operator, kind)
    return [Tensor(second if place else kind, shape) for place, shape in enumerate(made)]
