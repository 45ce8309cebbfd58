"""The right answers of a model, and the rules by which those of a built one are compared, each by
the type of the output and the operator that made it. Imports TVM's runtime and onnx.

Rounding, comparing and choosing jump: where the reference's real values lie next to an edge, the
value on the other side is right as well. Elsewhere whole numbers and truth values are equal.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import numpy as np
import onnx
from onnx import helper

from tuna.configs import DataType
from tuna.configs.model import SMALL, TOLERANCE
from tuna.libraries import reference
from tuna.libraries.tvm.model_answers import RightOutput
from tuna_models.reading import onnx_reference
from tuna_models.reading.onnx_graph import OnnxGraph
from tuna_models.reading.torch_importer import TorchModel

#: Largest distance from a tie, in steps of eight bits, at which a quantised value may be the next
#: one: a kernel's sums are right to this part of their largest value, which is 255 steps.
NEAR = 255 * reference.TOLERANCE[DataType.FP32]
#: Error of an operator in fp16, relative to its largest result.
_HALF = 2.0**-9
#: Operators of which the answer never falls where their first input rises.
_RISING = {
    *("Identity", "Reshape", "Flatten", "Squeeze", "Unsqueeze", "Transpose", "Cast"),
    *("Clip", "Relu", "Slice", "Expand", "Tile", "Max", "Min"),
}
#: Those of them that keep the order of the values.
_KEEPING = {"Identity", "Reshape", "Flatten", "Squeeze", "Unsqueeze", "Cast"}
_COMPARING = {"Greater", "GreaterOrEqual", "Less", "LessOrEqual", "Equal"}
_CHOOSING = {"ArgMax", "ArgMin", "TopK"}
_ROUNDING: Mapping[str, Callable[[Any], Any]] = {
    "Round": np.rint,
    "Floor": np.floor,
    "Ceil": np.ceil,
    "Cast": np.trunc,
}


def tolerance(model: Any) -> tuple[float, str]:
    """The largest error of a floating-point output relative to its largest magnitude, and why it is
    not `TOLERANCE`, where it is not.

    An operator in fp16 rounds its results by up to 2^-11 of the largest one, and parts of its sums
    as well: `_HALF` is allowed for each. Independent errors add up to that times the root of their
    number.
    """
    depth = _depth(model)
    if not depth:
        return TOLERANCE, ""
    found = min(max(TOLERANCE, _HALF * math.sqrt(depth)), 0.1)
    return found, f"fp16, {depth} operators one after the other"


def _tie(kind: Any, whole: Any) -> float:
    """Return the largest distance from a tie, in steps, at which a value of type `kind` may be
    rounded to the next whole number, of type `whole`."""
    limits = np.iinfo(whole)
    steps = int(limits.max) - int(limits.min)
    near = NEAR * steps / 255
    return min(0.5, max(near, _HALF * steps / 2) if np.dtype(kind) == np.float16 else near)


def names(model: Any) -> list[str]:
    """The names of the outputs; numbers of a PyTorch program's."""
    if isinstance(model, TorchModel):
        return [str(place) for place in range(len(model.program.graph_signature.user_outputs))]
    return [value.name for value in model.graph.output]


@dataclass(frozen=True)
class Right:
    """The right answers of a model to inputs."""

    outputs: Sequence[RightOutput]
    quantised: Sequence[RightOutput] = ()  #: right values of the quantised tensors
    operands: Mapping[str, Any] = field(default_factory=dict)  #: values of other requested tensors
    undefined: bool = False  #: True if a quantised tensor is rounded from NaN


def of(model: Any, inputs: Mapping[str, Any], near: float, operands: Sequence[str] = ()) -> Right:
    """The right answers of a model, and the values of `operands`; `near` is `tolerance`'s
    number."""
    if isinstance(model, TorchModel):
        answers = zip(model.reference(inputs), names(model), strict=True)
        tensors = model.quantised(inputs).items()
        off = _off(model, near)
        return Right(
            [RightOutput(values, name) for values, name in answers],
            [_beside_ties(name, values, real, np.float32, off) for name, (values, real) in tensors],
        )
    graph = _Graph(model, inputs, near, operands)
    return Right(graph.outputs(), graph.quantised(), graph.values, graph.undefined())


def line(answers: Sequence[RightOutput], near: float, why: str, quantised: int, titles: str) -> str:
    """The rules in one line; `titles` are those of the inputs."""
    words = list[str]()
    for answer in answers:
        kind = np.asarray(answer.values).dtype
        if kind.kind in "fc":
            nan = float(np.isnan(answer.values).mean()) if np.size(answer.values) else 0.0
            part = f", NaN in {max(nan, 1e-4):.2%} of its places" if nan else ""
            words.append(f"{answer.name} ({kind}) to {near:.2g} of its largest value{part}")
        elif answer.allowed is not None:
            words.append(
                f"{answer.name} ({kind}) the index of the reference, or of a value as good"
            )
        elif answer.low is not None:
            words.append(f"{answer.name} ({kind}) equal, the next value allowed next to a tie")
        else:
            words.append(f"{answer.name} ({kind}) equal")
    text = ", ".join(words[:_MAX_NAMES])
    more = len(words) - _MAX_NAMES
    text += f" and {more} more outputs" if more > 0 else ""
    half = f" ({_HALF * 255 / 2:.2g} where it is rounded from fp16)" if "fp16" in why else ""
    if "bf16" in why:
        half = f" ({near:.2g} of the largest value where it is rounded from sums of real values)"
    if quantised:
        text = (
            f"{quantised} quantised tensors, each computed from the reference's integers before it:"
            f" equal, one step allowed within {NEAR:.2g} of a tie{half}; of these {text}"
        )
    return f"{text}{f' ({why})' if why else ''}; on {titles}"


#: Outputs that are named, and truth values in the file about indices.
_MAX_NAMES, _MAX_ALLOWED = 4, 1 << 26


class _Graph:
    """An ONNX model with its values by the reference."""

    def __init__(
        self, model: Any, inputs: Mapping[str, Any], near: float, operands: Sequence[str]
    ) -> None:
        self._model, self._near = model, near
        self._graph = OnnxGraph(model)
        self._makers = {name: node for node in model.graph.node for name in node.output if name}
        read = [name for value in model.graph.output for name in self._behind(value.name)]
        self._answers, self._quantised, self.values = onnx_reference.evaluate(
            model, inputs, [*read, *operands]
        )

    def _behind(self, name: str) -> Iterator[str]:
        """Yield the values that a rule may read."""
        while (node := self._makers.get(name)) is not None:
            if node.op_type in {*_RISING, *_COMPARING, *_CHOOSING, *_ROUNDING}:
                yield from filter(None, (*node.input, *node.output))
            if node.op_type not in {*_RISING, *_ROUNDING}:
                break
            name = node.input[0]

    def outputs(self) -> list[RightOutput]:
        """The right outputs, of the types that the model declares."""
        found = []
        for declared, values in zip(self._model.graph.output, self._answers, strict=True):
            kind = declared.type.tensor_type.elem_type
            if kind:
                values = np.asarray(values).astype(
                    helper.tensor_dtype_to_np_dtype(kind), copy=False
                )
            found.append(self._near_edges(RightOutput(np.asarray(values), declared.name)))
        return found

    def quantised(self) -> list[RightOutput]:
        """The right whole numbers of each quantised tensor, those near a tie with their
        neighbours."""
        off = _off(self._model, self._near)
        return [
            RightOutput(values, name)
            if self._graph.is_quotient_exact(name)
            else _beside_ties(name, values, real, kind, off if self._graph.is_real(name) else 0.0)
            for name, (values, real, kind) in self._quantised.items()
        ]

    def undefined(self) -> bool:
        """Whether a quantised tensor is rounded from NaN."""
        return any(bool(np.any(np.isnan(real))) for _, real, _ in self._quantised.values())

    def _chain(self, name: str) -> tuple[Any, list[Any]]:
        """The operator that made whole numbers or truth values of real ones, or None, and those
        that moved them since, in order."""
        moved = list[Any]()
        while (node := self._makers.get(name)) is not None:
            if self._jumps(node):
                return node, moved
            if node.op_type not in {*_RISING, *_ROUNDING}:
                break
            moved.insert(0, node)
            name = node.input[0]
        return None, moved

    def _jumps(self, node: Any) -> bool:
        """Whether an operator makes whole numbers or truth values of real ones."""
        if node.op_type not in {*_COMPARING, *_CHOOSING, *_ROUNDING}:
            return False
        operand, made = (self.values[names[0]].dtype.kind for names in (node.input, node.output))
        if operand != "f" or self._is_rounded(node.input[0]):
            return False
        return node.op_type != "Cast" or made in "iub"

    def _is_rounded(self, name: str) -> bool:
        """Whether real values are whole numbers already."""
        while (node := self._makers.get(name)) is not None and node.op_type in _RISING:
            name = node.input[0]
        return node is not None and node.op_type in _ROUNDING

    def _near_edges(self, answer: RightOutput) -> RightOutput:
        """The answer with what else is right."""
        node, moved = self._chain(answer.name)
        if node is None or answer.values.dtype.kind == "f":
            return answer
        operands = [self.values[name] for name in node.input if name]
        if self._near <= TOLERANCE and all(map(self._graph.is_exact, filter(None, node.input))):
            return answer
        if node.op_type in _CHOOSING:
            return self._choices(answer, node, moved, operands[0])
        bounds = self._bounds(node, operands)
        for each in moved:
            others = [self.values[name] if name else None for name in each.input[1:]]
            bounds = [onnx_reference.run_node(self._model, each, [one, *others]) for one in bounds]
        low, high = (np.asarray(bound).astype(answer.values.dtype) for bound in bounds)
        low, high = np.minimum(low, answer.values), np.maximum(high, answer.values)
        return replace(answer, low=low, high=high)

    def _reach(self, *values: Any) -> Any:
        """Distances by which values may be off."""
        largest = max(
            float(np.max(np.abs(value[np.isfinite(value)]), initial=0.0)) for value in values
        )
        return self._near * (largest + SMALL)

    def _bounds(self, node: Any, operands: Sequence[Any]) -> list[Any]:
        """The smallest and the largest right results of a rounding or comparing operator, one step
        apart at most."""
        made = self.values[node.output[0]]
        if node.op_type in _COMPARING:
            first, second = np.broadcast_arrays(operands[0], operands[1])
            with np.errstate(invalid="ignore"):
                tied = np.abs(first.astype(np.float64) - second) <= self._reach(first, second)
            return [made & ~tied, made | tied]
        if made.dtype.kind == "b":  # a cast: whether it is 0
            tied = np.abs(operands[0]) <= self._reach(operands[0])
            return [made & ~tied, made | tied]
        real, off = operands[0].astype(np.float64), min(self._reach(operands[0]), 0.5)
        lowest, highest = (_ROUNDING[node.op_type](real + by) for by in (-off, off))
        if made.dtype.kind in "iu":
            limits = np.iinfo(made.dtype)
            lowest, highest = (np.clip(each, limits.min, limits.max) for each in (lowest, highest))
        return [each.astype(made.dtype) for each in (lowest, highest)]

    def _choices(
        self, answer: RightOutput, node: Any, moved: Sequence[Any], values: Any
    ) -> RightOutput:
        """Indices may be those of other values that are as large, or as small."""
        if not all(each.op_type in _KEEPING for each in moved):
            return answer
        named = {attribute.name: attribute.i for attribute in node.attribute}
        axis = named.get("axis", -1 if node.op_type == "TopK" else 0) % max(values.ndim, 1)
        lines = np.moveaxis(values, axis, -1).astype(np.float64)
        place = [*node.output].index(_source(answer.name, moved))
        chosen = np.asarray(self.values[node.output[place]])
        if node.op_type == "TopK" or named.get("keepdims", 1):
            chosen = np.moveaxis(chosen, axis, -1)
        else:
            chosen = chosen[..., None]
        if chosen.size * lines.shape[-1] > _MAX_ALLOWED:
            return answer
        reach = 2 * self._reach(values)
        theirs = np.take_along_axis(lines, chosen.astype(np.int64), -1)
        allowed = np.abs(lines[..., None, :] - theirs[..., None]) <= reach
        # the axis of the choices back to its place, before that of all indices
        allowed = np.moveaxis(allowed, -2, axis if node.op_type == "TopK" else -2)
        return replace(answer, allowed=allowed.reshape(*answer.values.shape, lines.shape[-1]))


def _off(model: Any, near: float) -> float:
    """The largest error of sums of real values in bf16, relative to the largest: a `near` beyond
    that of the model itself; else 0."""
    return near if near > tolerance(model)[0] else 0.0


def _beside_ties(name: str, values: Any, real: Any, kind: Any, off: float) -> RightOutput:
    """The whole numbers of a quantised tensor, those near a tie with their neighbours; `real` are
    the values of type `kind` that were rounded, in steps, and may be `off` by this part of the
    largest."""
    limits, largest = np.iinfo(values.dtype), np.max(np.abs(real[np.isfinite(real)]), initial=0.0)
    reach = 0.5 + max(_tie(kind, values.dtype), off * float(largest))
    low, high = np.ceil(real - reach), np.floor(real + reach)
    low, high = (np.clip(bound, limits.min, limits.max) for bound in (low, high))
    return RightOutput(
        values,
        name,
        np.minimum(low.astype(values.dtype), values),
        np.maximum(high.astype(values.dtype), values),
    )


def _source(name: str, moved: Sequence[Any]) -> str:
    """The name of a value before it was moved."""
    return str(moved[0].input[0]) if moved else name


def _depth(model: Any) -> int:
    """The number of operators on the longest way through a model that computes in fp16, else 0."""
    if isinstance(model, TorchModel):
        return _torch_depth(model)
    half, graph = onnx.TensorProto.FLOAT16, model.graph
    types = [tensor.data_type for tensor in graph.initializer]
    types += [value.type.tensor_type.elem_type for value in graph.input]
    types += [
        attribute.i for node in graph.node if node.op_type == "Cast" for attribute in node.attribute
    ]
    if half not in types:
        return 0
    depths = dict[str, int]()
    for node in graph.node:
        depth = 1 + max((depths.get(name, 0) for name in node.input), default=0)
        depths.update(dict.fromkeys(node.output, depth))
    return max(depths.values(), default=0)


def _torch_depth(model: TorchModel) -> int:
    program, depths, half = model.program, dict[Any, int](), False
    for node in program.graph.nodes:
        half = half or "float16" in str(getattr(node.meta.get("val"), "dtype", ""))
        more = node.op == "call_function"
        depths[node] = more + max((depths[each] for each in node.all_input_nodes), default=0)
    return max(depths.values(), default=0) if half else 0
