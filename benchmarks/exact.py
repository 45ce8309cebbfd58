"""ONNX models in float64, sums of quantised tensors in whole numbers; for benchmarks/quantised.py.

Written from ONNX's definitions, apart from `tuna_models`. Each operator reads the tensors that a
built model returned where there are some, so that a difference of one step does not spread. With
fp32 in the place of float64 the same shows how far a runtime's arithmetic may be off. Operators
that have no definition here are those of ONNX's reference evaluator, one at a time.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
from onnx import helper, numpy_helper
from onnx.reference import ReferenceEvaluator

from benchmarks.exact_operators import OPERATORS, Scaled, conv, gemm, matmul, real, whole_of


@dataclass(frozen=True)
class Step:
    """A tensor before its rounding."""

    steps: Any  #: Real values over the scale, without the zero point
    zero: Any  #: Zero point
    limits: Any  #: `numpy.iinfo` of its type

    def whole(self) -> Any:
        """The nearest whole numbers, to even, plus the zero point, within the limits."""
        return np.clip(np.rint(self.steps) + self.zero, self.limits.min, self.limits.max)


@dataclass
class Evaluation:
    """The values of a model by name."""

    model: Any
    inputs: Mapping[str, Any]
    #: Returns the quantised tensor of a built model, by name and type, if it has it
    built: Callable[[str, Any], Any] = lambda name, kind: None
    kind: Any = np.float64  #: Type of real values
    steps: dict[str, Step] = field(default_factory=dict)

    @property
    def opset(self) -> int:
        """The version of ONNX's own operators."""
        domains = {entry.domain: entry.version for entry in self.model.opset_import}
        return int(domains.get("", domains.get("ai.onnx", 1)))

    def run(self) -> Evaluation:
        """Compute all values."""
        self.values: dict[str, Any] = {"": None}
        for tensor in self.model.graph.initializer:
            self.values[tensor.name] = self._typed(numpy_helper.to_array(tensor))
        for name, array in self.inputs.items():
            self.values[name] = self._typed(array)
        self._run(self.model.graph.node)
        return self

    def outputs(self) -> list[Any]:
        """The model's answers."""
        return [real(self.values[value.name]) for value in self.model.graph.output]

    def _run(self, nodes: Sequence[Any]) -> None:
        for node in nodes:
            with np.errstate(all="ignore"):
                found = self._node(node)
            for name, value in zip(node.output, found, strict=False):
                if name:
                    self.values[name] = self._typed(value)

    def _node(self, node: Any) -> Sequence[Any]:
        attributes = {each.name: helper.get_attribute_value(each) for each in node.attribute}
        attributes["opset"] = self.opset
        given = [self.values[name] for name in node.input]
        if node.op_type == "If":
            branch = attributes["then_branch" if bool(given[0]) else "else_branch"]
            for tensor in branch.initializer:
                self.values[tensor.name] = self._typed(numpy_helper.to_array(tensor))
            self._run(branch.node)
            return [self.values[value.name] for value in branch.output]
        if node.op_type in _ROUNDING:
            found: Sequence[Any] = _ROUNDING[node.op_type](self, node, given, attributes)
            return found
        if node.op_type in OPERATORS:
            return [OPERATORS[node.op_type](given, attributes)]
        return self._by_reference(node, [real(value) for value in given])

    def _by_reference(self, node: Any, given: Sequence[Any]) -> Sequence[Any]:
        """The outputs of ONNX's reference evaluator."""
        named = dict(zip(node.input, given, strict=True))
        named.pop("", None)
        graph = helper.make_graph(
            [node],
            "single",
            [helper.make_tensor_value_info(name, 0, None) for name in named],
            [helper.make_tensor_value_info(name, 0, None) for name in node.output if name],
        )
        model = helper.make_model(
            graph, opset_imports=self.model.opset_import, functions=self.model.functions
        )
        found = iter(ReferenceEvaluator(model).run(None, named))
        return [next(found) if name else None for name in node.output]

    def _typed(self, value: Any) -> Any:
        """Real values in the type of real values."""
        if isinstance(value, Scaled) or value is None:
            return value
        array = np.asarray(value)
        return array.astype(self.kind, copy=False) if array.dtype.kind == "f" else array

    def rounded(self, name: str, step: Step) -> Any:
        """The whole numbers of a quantised tensor: the built model's, where it returned them."""
        self.steps[name] = step
        found = self.built(name, step.limits.dtype)
        return step.whole().astype(step.limits.dtype) if found is None else found

    def scaled(self, given: Sequence[Any], axis: int = 1) -> Scaled:
        """What a tensor, its scale and its zero point stand for."""
        x, scale, zero = [*given, None][:3]
        scale = _along(np.asarray(scale, self.kind), x, axis)
        whole = x.astype(np.float64)
        if zero is not None:
            whole = whole - _along(zero.astype(np.float64), x, axis)
        return Scaled(whole, scale, axis % x.ndim if scale.ndim else None)

    def quantised(self, name: str, value: Any, given: Sequence[Any], axis: int = 1) -> Any:
        """Round to a scale and a zero point."""
        scale, zero = [*given, None][:2]
        zero = np.zeros((), np.uint8) if zero is None else zero
        steps = real(value) / _along(np.asarray(scale, self.kind), value, axis)
        return self.rounded(
            name, Step(steps, _along(zero.astype(np.float64), value, axis), np.iinfo(zero.dtype))
        )


def _along(values: Any, x: Any, axis: int) -> Any:
    """One number, or one for each extent of an axis of x."""
    if values.size == 1:
        return values.reshape(())
    rank = (x.whole if isinstance(x, Scaled) else x).ndim
    return values.reshape([-1 if place == axis % rank else 1 for place in range(rank)])


def _dequantize(run: Evaluation, node: Any, given: Sequence[Any], attributes: Any) -> Any:
    return [run.scaled(given, attributes.get("axis", 1))]


def _quantize(run: Evaluation, node: Any, given: Sequence[Any], attributes: Any) -> Any:
    return [run.quantised(node.output[0], given[0], given[1:], attributes.get("axis", 1))]


def _dynamic(run: Evaluation, node: Any, given: Sequence[Any], attributes: Any) -> Any:
    x = real(given[0])
    low, high = min(x.min(initial=0), 0), max(x.max(initial=0), 0)
    scale = run.kind(run.kind(high - low) / run.kind(255))
    limits, name, zero_name = np.iinfo(np.uint8), node.output[0], node.output[2]
    lowest = np.asarray(-low / scale if scale else 0)
    zero = run.rounded(zero_name, Step(lowest, 0, limits)).reshape(())
    steps = x / scale if scale else np.zeros_like(x)
    return [run.rounded(name, Step(steps, float(zero), limits)), np.asarray(scale), zero]


def _qlinear(places: int, operator: str) -> Callable[..., Any]:
    """An operator of so many quantised tensors, each with scale and zero point; the answer's
    follow."""

    def compute(run: Evaluation, node: Any, given: Sequence[Any], attributes: Any) -> Any:
        tensors = [run.scaled(given[3 * place : 3 * place + 3]) for place in range(places)]
        last = given[3 * places : 3 * places + 2]
        value = OPERATORS[operator](tensors, attributes)
        return [run.quantised(node.output[0], value, last)]

    return compute


def _qlinear_conv(run: Evaluation, node: Any, given: Sequence[Any], attributes: Any) -> Any:
    x, w = run.scaled(given[:3]), run.scaled(given[3:6], 0)
    value = conv([x, w], attributes)
    if len(given) > 8 and given[8] is not None:
        channels = (1, -1, *(1,) * (x.whole.ndim - 2))
        scale = np.reshape(w.scale, channels) * x.scale
        value = Scaled(whole_of(x, w, attributes) + given[8].reshape(channels), scale).real()
    return [run.quantised(node.output[0], value, given[6:8])]


def _qlinear_matmul(run: Evaluation, node: Any, given: Sequence[Any], attributes: Any) -> Any:
    a, b = run.scaled(given[:3], -2), run.scaled(given[3:6], -1)
    return [run.quantised(node.output[0], matmul([a, b], {}), given[6:8])]


def _qgemm(run: Evaluation, node: Any, given: Sequence[Any], attributes: Any) -> Any:
    given = [*given, None, None, None][:9]
    a = run.scaled(given[:3])
    b = run.scaled(given[3:6], 0 if attributes.get("transB") else 1)
    value = gemm([a, b], {**attributes, "alpha": 1.0})
    if given[6] is not None:
        value = value + (given[6].astype(np.float64) * np.ravel(b.scale) * a.scale).astype(run.kind)
    value = value * run.kind(attributes.get("alpha", 1.0))
    return [value if given[7] is None else run.quantised(node.output[0], value, given[7:9])]


def _qlinear_concat(run: Evaluation, node: Any, given: Sequence[Any], attributes: Any) -> Any:
    parts = [run.scaled(given[at : at + 3]).real() for at in range(2, len(given), 3)]
    return [run.quantised(node.output[0], np.concatenate(parts, attributes["axis"]), given[:2])]


def _qlinear_softmax(run: Evaluation, node: Any, given: Sequence[Any], attributes: Any) -> Any:
    x = run.scaled(given[:3]).real()
    e = np.exp(x - x.max(attributes.get("axis", -1), keepdims=True))
    value = e / e.sum(attributes.get("axis", -1), keepdims=True)
    return [run.quantised(node.output[0], value, given[3:5])]


_ROUNDING: Mapping[str, Callable[..., Any]] = {
    "DequantizeLinear": _dequantize,
    "QuantizeLinear": _quantize,
    "DynamicQuantizeLinear": _dynamic,
    "QLinearConv": _qlinear_conv,
    "QLinearMatMul": _qlinear_matmul,
    "QGemm": _qgemm,
    "QLinearConcat": _qlinear_concat,
    "QLinearSoftmax": _qlinear_softmax,
    "QLinearAdd": _qlinear(2, "Add"),
    "QLinearMul": _qlinear(2, "Mul"),
    "QLinearSigmoid": _qlinear(1, "Sigmoid"),
    "QLinearLeakyRelu": _qlinear(1, "LeakyRelu"),
    "QLinearAveragePool": _qlinear(1, "AveragePool"),
    "QLinearGlobalAveragePool": _qlinear(1, "GlobalAveragePool"),
}
