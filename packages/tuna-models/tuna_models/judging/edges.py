"""The cases of a model's check: the right answers to random inputs and to those of `draws.py`, and
to inputs that reach the edges which the model's own constants name. Imports onnx.

Normal inputs pass a bound of 255 by, hide whether an epsilon is there, and hold no two equal
values. Where the reference has NaN anything is right. Inputs on which it jumps by as little as
kernels round say nothing, and are left out.
"""

from __future__ import annotations

import math
import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from onnx import numpy_helper

from tuna.configs.model import TOLERANCE
from tuna.libraries.tvm.model_answers import Case, distance
from tuna_models.judging import draws, right_answers
from tuna_models.judging.inputs import is_real
from tuna_models.limits import raise_memory_error
from tuna_models.reading.onnx_graph import OnnxGraph
from tuna_models.reading.torch_importer import TorchModel

#: Largest error on such inputs: of large values the digits behind the point are fewer, which an
#: exponential makes larger.
EDGES = 1e-2
#: Seconds of the reference after which it computes no other inputs.
_LONG_S = 30.0
#: Largest bound that inputs are drawn for; masks have larger ones.
_LARGEST = 1e6
#: CPU seconds of the reference after which it computes no more inputs, if there are two.
_BUDGET_S = 3.0
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
#: An epsilon by default, and the smallest factor of quiet inputs.
_USUAL, _QUIETEST = 1e-5, 1e-3
#: Parts by which inputs are moved to see whether answers stay, in fp32 and in fewer bits.
_ULPS, _ULPS_OF_HALF = 2.0**-20, 2.0**-9
_LARGE = "large"
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


def epsilon(model: Any) -> float:
    """The largest of the small constants by which the model keeps values from zero; 0 without."""
    constants = _constants(model)
    read: dict[str, set[str]] = {}
    for node in model.graph.node:
        for name in node.input:
            read.setdefault(name, set()).add(node.op_type)
    found = [0.0]
    for node in model.graph.node:
        if node.op_type in _NORMALISING:
            given = [each.f for each in node.attribute if each.name == "epsilon"]
            found += given or [_USUAL]
        elif node.op_type in ("Add", "Max", "Clip") and read.get(node.output[0], set()) & _AT_ZERO:
            found += [value for value in _values(node, constants) if 0 < value <= _EPSILON]
    return max(found)


def cases(
    model: Any, inputs: Sequence[Mapping[str, Any]], values: Mapping[str, Any], near: float
) -> tuple[list[Case], str]:
    """The right answers to drawn inputs, and to the others; and in words what inputs there are.
    `near` as in `right_answers.of`."""
    torch = isinstance(model, TorchModel)
    wanted = [] if torch else bounds(model)
    started = time.monotonic()
    right = right_answers.of(model, values, near, [bound.operand for bound in wanted])
    checked, words = [_case(values, right, "", near)], ["random"]
    missed = _missed(wanted, right)
    if time.monotonic() - started > _LONG_S:
        return checked, "random inputs alone, for the reference takes long"
    graph = None if torch else OnnxGraph(model)
    reference = _Reference(model, near, graph is None or graph.jumps() or near > TOLERANCE)
    started, left = time.process_time(), False
    sets = _sets(model, graph, inputs, values, missed)
    for title, others in draws.differing(sets, values):
        if len(checked) > 1 and time.process_time() - started > _BUDGET_S:
            left = True
            break
        defined = reference.answers(others, [bound for bound, _ in missed], title)
        if defined is None:
            continue
        missed = _missed([bound for bound, _ in missed], defined)
        checked.append(_case(others, defined, title, near))
        words.append(title)
    text = " and ".join(filter(None, (", ".join(words[:-1]), words[-1]))) + " inputs"
    if left:
        text += f" (others are left out after {_BUDGET_S:.0f} CPU seconds)"
    if missed:
        bound, _ = missed[0]
        more = f" and of {len(missed) - 1} others" if len(missed) > 1 else ""
        text += f" (none pass {bound.value:g} of {bound.node}{more})"
    return checked, text


def _sets(
    model: Any,
    graph: OnnxGraph | None,
    inputs: Sequence[Mapping[str, Any]],
    values: Mapping[str, Any],
    missed: Sequence[tuple[Bound, float]],
) -> Iterator[tuple[str, draws.Arrays]]:
    """Yield titles and inputs, the most telling first: there may be no time for all."""
    given = graph, inputs, values
    factor = max((times for _, times in missed if times < math.inf), default=1.0)
    if factor > 1:
        yield f"{factor:.3g} times larger", draws.scaled(inputs, values, factor)
    if graph is not None:
        yield "hidden", draws.hidden(graph, inputs, values)
    yield "silent", draws.silent(*given)
    yield "extreme", draws.ends(*given)
    yield "lowest", draws.lowest(*given)
    yield "sparse", draws.sparse(*given)
    yield "highest", draws.highest(*given)
    if graph is not None:
        yield "halfway", draws.halfway(graph, inputs, values)
        if small := epsilon(model):
            yield "quiet", draws.scaled(inputs, values, max(math.sqrt(small), _QUIETEST))
        if not graph.narrows():
            yield _LARGE, draws.scaled(inputs, values)


@dataclass(frozen=True)
class _Reference:
    """The reference's answers to inputs that may be too much for it."""

    model: Any
    near: float
    fragile: bool  #: True if an ulp before an operator may make a step behind it

    def answers(
        self, values: Mapping[str, Any], wanted: Sequence[Bound], title: str
    ) -> right_answers.Right | None:
        """The right answers, None where it has none, and where they say nothing."""
        operands = [bound.operand for bound in wanted]
        with np.errstate(all="ignore"):
            try:
                right = right_answers.of(self.model, values, self.near, operands)
                if self.fragile or title == _LARGE:
                    part = _ULPS if self.near <= TOLERANCE else _ULPS_OF_HALF
                    moved = right_answers.of(self.model, draws.moved(values, part), self.near)
                    if not _stay(right, moved, max(EDGES, self.near) / 4):
                        return None
            except Exception as error:  # its operators raise whatever they do
                raise_memory_error(error)
                return None
        known = [each.values for each in right.outputs]
        real = [each for each in known if is_real(each)]
        if len(real) < len(known) and any(map(_has_nan, (*real, *right.operands.values()))):
            return None  # whole numbers of NaN are any
        if title == _LARGE and any(np.any(np.isinf(each)) for each in real):
            return None  # another order of sums overflows elsewhere
        if right.undefined or (known and len(real) == len(known) and all(map(_is_nan, real))):
            return None
        return right


def _stay(right: right_answers.Right, moved: right_answers.Right, part: float) -> bool:
    """Whether answers are where they were, to a part of the largest, but for those of which the
    rules say what is right besides."""
    for one, other in zip(right.outputs, moved.outputs, strict=True):
        if is_real(one.values):
            defined = ~np.isnan(one.values)
            if distance(other.values[defined], one.values[defined]) > part:
                return False
        elif one.allowed is None and one.low is None and np.any(one.values != other.values):
            return False
    return True


def _case(values: Mapping[str, Any], right: right_answers.Right, title: str, near: float) -> Case:
    tolerance = max(EDGES, near) if title else None
    arrays = list(values.values())
    return Case(arrays, right.outputs, right.quantised, title, tolerance, partial=bool(title))


def _missed(wanted: Sequence[Bound], right: right_answers.Right) -> list[tuple[Bound, float]]:
    """The bounds that are not reached, and how many times larger inputs have to be."""
    found = [(bound, bound.reach(right.operands[bound.operand])) for bound in wanted]
    return [(bound, min(times, _LARGEST)) for bound, times in found if times > 1]


def _has_nan(values: Any) -> bool:
    return is_real(values) and bool(np.any(np.isnan(values)))


def _is_nan(values: Any) -> bool:
    return is_real(values) and bool(np.all(np.isnan(values))) and np.size(values) > 0


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
