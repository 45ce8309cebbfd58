"""Inputs on which an ONNX model reaches the edges that its own constants name. Imports onnx.

Normal inputs pass a bound of 255 by, and hide whether an epsilon is there. So where a bound is not
reached they are drawn larger, where an epsilon is added they are zero as well, and of masks a row
is hidden whole. An answer to such inputs that holds NaN by the reference says nothing.
"""

from __future__ import annotations

import math
import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from onnx import numpy_helper

from tuna.libraries.tvm.model_answers import Case
from tuna_models import rules
from tuna_models.torch_importer import TorchModel

#: Largest error on such inputs: of large values the digits behind the point are fewer, which an
#: exponential makes larger.
EDGES = 1e-2
#: Seconds of the reference after which it computes no other inputs.
_LONG_S = 30.0
#: Largest bound that inputs are drawn for; masks have larger ones.
_LARGEST = 1e6
#: How far inputs go beyond a bound.
_BEYOND = 1.5
#: Largest constant that counts as an epsilon.
_EPSILON = 1e-2
#: Operators that are undefined at zero or change much beside it, and the ones that have an epsilon.
_AT_ZERO = {"Sqrt", "Log", "Div", "Reciprocal", "Pow"}
_NORMALISING = {
    *("LayerNormalization", "InstanceNormalization", "GroupNormalization", "RMSNormalization"),
    *("MeanVarianceNormalization", "LpNormalization", "SimplifiedLayerNormalization"),
}
#: Operators whose answer to equal values is one of many.
_ORDERING = {"TopK", "ArgMax", "ArgMin", "NonMaxSuppression", "Unique", "Hardmax"}
_COMPARING = {"Greater", "GreaterOrEqual", "Less", "LessOrEqual"}


@dataclass(frozen=True)
class Bound:
    """A constant beyond which an operator does something else."""

    node: str  #: title of the operator
    operand: str  #: name of the operand that is compared with `value`
    value: float

    def reach(self, operand: Any) -> float:
        """Factor by which inputs have to be larger; 1 if it is reached, infinite where no value has
        its sign."""
        values = np.asarray(operand, np.float64) * math.copysign(1.0, self.value)
        largest = float(np.max(values[np.isfinite(values)], initial=0.0))
        if largest > abs(self.value):
            return 1.0
        return _BEYOND * abs(self.value) / largest if largest else math.inf


def bounds(model: Any) -> list[Bound]:
    """The bounds of a model's clips, minima, maxima and comparisons by constants other than 0."""
    constants = _constants(model)
    found = []
    for node in model.graph.node:
        for operand, value in _bounded(node, constants):
            if value and abs(value) <= _LARGEST and operand not in constants:
                title = f"{node.op_type} {node.name or node.output[0]}"
                found.append(Bound(title, operand, value))
    return found


def has_epsilon(model: Any) -> bool:
    """Whether the model keeps values from zero by a small constant, and inputs of zeros have one
    answer."""
    constants = _constants(model)
    if any(node.op_type in _ORDERING for node in model.graph.node):
        return False
    read: dict[str, set[str]] = {}
    for node in model.graph.node:
        for name in node.input:
            read.setdefault(name, set()).add(node.op_type)
    return any(
        node.op_type in _NORMALISING
        or (
            node.op_type in ("Add", "Max", "Clip")
            and read.get(node.output[0], set()) & _AT_ZERO
            and any(0 < abs(value) <= _EPSILON for value in _values(node, constants))
        )
        for node in model.graph.node
    )


def cases(
    model: Any, inputs: Sequence[Mapping[str, Any]], values: Mapping[str, Any], near: float
) -> tuple[list[Case], str]:
    """The right answers to drawn inputs, and to those at the edges; and in words what inputs there
    are. `near` as in `rules.of`."""
    wanted = [] if isinstance(model, TorchModel) else bounds(model)
    started = time.monotonic()
    right = rules.of(model, values, near, [bound.operand for bound in wanted])
    checked, words = [_case(values, right, "")], ["random"]
    missed = _missed(wanted, right)
    if isinstance(model, TorchModel):
        return checked, "random inputs"
    if time.monotonic() - started > _LONG_S:
        return checked, "random inputs alone, for the reference takes long"
    factor = max((times for _, times in missed if times < math.inf), default=1.0)
    sets = {f"{factor:.3g} times larger": _larger(values, factor)} if factor > 1 else {}
    if has_epsilon(model):
        sets["silent"] = _silent(values)
    if (hidden := _hidden(inputs, values)) is not None:
        sets["hidden"] = hidden
    for title, edge_values in sets.items():
        defined = _defined(model, edge_values, near, [bound for bound, _ in missed])
        if defined is None:
            continue
        right = defined
        missed = _missed([bound for bound, _ in missed], right)
        checked.append(_case(edge_values, right, title))
        words.append(title)
    text = " and ".join(filter(None, (", ".join(words[:-1]), words[-1]))) + " inputs"
    if missed:
        bound, _ = missed[0]
        more = f" and of {len(missed) - 1} others" if len(missed) > 1 else ""
        text += f" (none pass {bound.value:g} of {bound.node}{more})"
    return checked, text


def _defined(
    model: Any, values: Mapping[str, Any], near: float, wanted: Sequence[Bound]
) -> rules.Right | None:
    """The right answers, None where the reference has none or NaN."""
    try:
        right = rules.of(model, values, near, [bound.operand for bound in wanted])
    except Exception:  # its operators raise whatever they do
        return None
    undefined = (_is_real(each.values) and np.any(np.isnan(each.values)) for each in right.outputs)
    return None if any(undefined) else right


def _case(values: Mapping[str, Any], right: rules.Right, title: str) -> Case:
    near = EDGES if title else None
    return Case(list(values.values()), right.outputs, right.quantised, title, near)


def _missed(wanted: Sequence[Bound], right: rules.Right) -> list[tuple[Bound, float]]:
    """The bounds that are not reached, and how many times larger inputs have to be."""
    found = [(bound, bound.reach(right.operands[bound.operand])) for bound in wanted]
    return [(bound, min(times, _LARGEST)) for bound, times in found if times > 1]


def _is_real(values: Any) -> bool:
    return bool(np.asarray(values).dtype.kind == "f")


def _larger(values: Mapping[str, Any], factor: float) -> dict[str, Any]:
    """The inputs with real ones so many times larger."""
    return {
        name: np.asarray(array * factor, array.dtype) if _is_real(array) else array
        for name, array in values.items()
    }


def _silent(values: Mapping[str, Any]) -> dict[str, Any]:
    """The inputs with real ones that are zero."""
    return {
        name: np.zeros_like(array) if _is_real(array) else array for name, array in values.items()
    }


def _hidden(
    inputs: Sequence[Mapping[str, Any]], values: Mapping[str, Any]
) -> dict[str, Any] | None:
    """The inputs with the last row of each mask hidden whole; None without a mask."""
    masks = [each["name"] for each in inputs if _is_mask(each)]
    if not masks:
        return None
    found = {name: array.copy() for name, array in values.items()}
    for name in masks:
        found[name].reshape(-1, found[name].shape[-1])[-1] = 0
    return found


def _is_mask(given: Mapping[str, Any]) -> bool:
    kind = np.dtype(given["dtype"])
    whole = kind.kind == "b" or (kind.kind in "iu" and kind.itemsize > 1)
    return bool(whole and not given.get("bounds") and given["shape"] and min(given["shape"]) > 0)


def _constants(model: Any) -> dict[str, float]:
    """The values of single constants, by name."""
    found = {
        tensor.name: float(numpy_helper.to_array(tensor).reshape(()))
        for tensor in model.graph.initializer
        if math.prod(tensor.dims) == 1 and tensor.data_type in _NUMBERS
    }
    for node in model.graph.node:
        for tensor in (each.t for each in node.attribute if each.name == "value"):
            if math.prod(tensor.dims) == 1 and tensor.data_type in _NUMBERS:
                found[node.output[0]] = float(numpy_helper.to_array(tensor).reshape(()))
    return found


#: FLOAT, INT32, INT64, FLOAT16 and DOUBLE of ONNX.
_NUMBERS = (1, 6, 7, 10, 11)


def _bounded(node: Any, constants: Mapping[str, float]) -> Iterator[tuple[str, float]]:
    """Yield what an operator compares with a constant, and that."""
    if node.op_type == "Clip":
        for value in _values(node, constants):
            yield node.input[0], value
    elif node.op_type in {"Min", "Max", *_COMPARING} and len(node.input) == 2:
        for one, other in (node.input, node.input[::-1]):
            if other in constants:
                yield one, constants[other]


def _values(node: Any, constants: Mapping[str, float]) -> list[float]:
    """The constants that an operator reads; before opset 11 those of a clip are attributes."""
    found = [constants[name] for name in node.input if name in constants]
    return found + [each.f for each in node.attribute if each.name in ("min", "max")]
