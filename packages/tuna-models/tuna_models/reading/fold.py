"""One walk through an ONNX graph in the order in which it runs, before any of it is imported.

Operators are checked, their outputs' types and shapes inferred, and what follows from shapes and
constants alone is computed: exporters write `Shape`, `Slice`, `Concat` and arithmetic before a
`Reshape` or `Resize`, of which TVM's importer needs the result. Functions are written out, and the
branches and loops that known values decide. A budget is asked before anything is made; where large
constants follow from others, another walk counts all of them first. The shapes of the inputs are
fixed before.
"""

from __future__ import annotations

import contextlib
import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from operator import is_
from typing import Any

import numpy as np
import onnx
from onnx import helper, numpy_helper

from tuna.common.messages import counted
from tuna_models.arguments import TYPES
from tuna_models.names import OWN_DOMAINS
from tuna_models.reading import costs, functions, inference, misfits
from tuna_models.reading.bodies import Inside, names_read, version_of
from tuna_models.reading.known import UNKNOWN, Value
from tuna_models.reading.onnx_files import is_own
from tuna_models.reading.onnx_reference import evaluator
from tuna_models.reading.whole_constants import MOVING, Product, product_of, write
from tuna_models.refusals import Refusal

#: The first version of ONNX's operators whose Unsqueeze takes its axes as an input.
_AXES_ARE_INPUTS = 13
#: Bytes of computed constants after which all are counted before any other is made, and up to which
#: one is made in that walk: it may decide a shape.
_UNCOUNTED_BYTES, _FEW_BYTES = 64 << 20, 1 << 16
#: Random operators, which have no constant answer.
_RANDOM = {
    *("RandomNormal", "RandomUniform", "RandomNormalLike", "RandomUniformLike"),
    *("Multinomial", "Bernoulli"),
}


@dataclass(frozen=True)
class Folded:
    """A graph without functions, and branches and loops that known values decide."""

    model: Any
    values: Mapping[str, Value]  #: Known types, shapes and values, by name


def fold(model: Any) -> Folded:
    """Walk through a model, whose operators are in order; raises Refusal."""
    walk = _Walk(model, _UNCOUNTED_BYTES)
    try:
        walk.run(model.graph.node)
    except _UncountedError:
        _Walk(model, counts=True).run(model.graph.node)
        walk = _Walk(model)
        walk.run(model.graph.node)
    return Folded(walk.written(), walk.values)


def known(model: Any) -> Mapping[str, Value]:
    """Return the known types, shapes and values of a model with operators that are refused, by
    name."""
    walk = _Walk(model)
    for node in model.graph.node:
        try:
            walk.run([node])
        except Refusal:
            with contextlib.suppress(Refusal):
                inputs = known_inputs(node, walk.values)
                answers = inference.answers(node, inputs, version_of(model, ""))
                walk.values.update(zip(node.output, answers, strict=False))
    return walk.values


def known_inputs(node: Any, values: Mapping[str, Value]) -> list[Value | None]:
    """Return the known facts about an operator's inputs; None for absent ones."""
    return [values.get(name, UNKNOWN) if name else None for name in node.input]


class _UncountedError(Exception):
    """The constants that are computed are many bytes, and it is not known how many are to come."""


class _Walk:
    def __init__(self, model: Any, most_bytes: float = math.inf, *, counts: bool = False) -> None:
        """Raises _UncountedError after so many bytes of computed constants; with `counts` larger
        ones than a few KiB are counted, and not made."""
        self._left_bytes, self._counts = most_bytes, counts
        self._model, self._opset = model, version_of(model, "")
        self._budget = costs.ImportBudget()
        self._nodes: list[Any] = []  #: those that are left
        self.values: dict[str, Value] = {}
        for value in model.graph.input:
            given = Value(value.type.SerializeToString())
            self._budget.check_size(given, f"its input {value.name} is")
            self.values[value.name] = _without_values(given)
        for tensor in model.graph.initializer:
            self._add_tensor(tensor.name, tensor)

    def run(self, nodes: Iterable[Any]) -> None:
        """Walk through operators."""
        for node in nodes:
            self._budget.operators += 1
            self._visit(node)

    def written(self) -> Any:
        """The model with constants in the place of what was computed, itself where that is nothing.
        Those that are whole numbers times scales stay operators on two constants."""
        graph, model = self._model.graph, type(self._model)()
        weights = {tensor.name for tensor in graph.initializer}
        used = {name for node in self._nodes for name in names_read(node)}
        used |= {value.name for value in graph.output}
        same = len(self._nodes) == len(graph.node) and all(map(is_, self._nodes, graph.node))
        if same and weights <= used:  # a copy would be one of the weights
            return self._model
        model.ir_version, model.graph.name = self._model.ir_version, graph.name
        model.opset_import.extend(self._model.opset_import)
        real = [value for value in graph.input if value.name not in weights]
        inputs = {value.name for value in real}
        model.graph.input.extend(real)
        model.graph.output.extend(graph.output)
        for name, value in self.values.items():
            if name in inputs or name not in used or not value.is_known:
                continue
            if value.product is not None:
                model.graph.node.append(write(model.graph, name, value.product))
            elif value.tensor is not None:
                model.graph.initializer.add().CopyFrom(value.tensor)
                model.graph.initializer[-1].name = name
            else:
                model.graph.initializer.append(numpy_helper.from_array(value.values, name))
        model.graph.node.extend(self._nodes)
        return model

    def _visit(self, node: Any) -> None:
        inputs = known_inputs(node, self.values)
        misfits.check(node, inputs)
        version = version_of(self._model, node.domain)
        if functions.is_function(node, version) and (
            operators := functions.written_out(node, inputs, version)
        ):
            self.run(operators)
            return
        answers = [Value() for _ in node.output]
        if node.domain in OWN_DOMAINS and node.op_type in _WRITERS:
            if _WRITERS[node.op_type](self, node):
                return
        elif is_own(node.domain, node.op_type):
            answers = inference.answers(node, inputs, self._opset)
            for answer in answers:
                self._budget.check_size(answer, node)
            answers = self._computed(node, inputs, answers)
        self.values.update(zip(node.output, answers, strict=False))
        if not all(self.values[name].is_known for name in node.output if name):
            self._nodes.append(node)

    def _add_tensor(self, name: str, tensor: Any) -> Value:
        value = Value.of_tensor(tensor)
        self._budget.check_size(value, f"its constant {name} is")
        self._budget.add_constant(value.size_bytes, name)
        self.values[name] = value
        return value

    def _add_values(self, name: str, values: Any) -> str:
        self.values[name] = Value.of_values(np.asarray(values))
        return name

    def _computed(
        self, node: Any, inputs: Sequence[Value | None], answers: list[Value]
    ) -> list[Value]:
        """The answers, with values where they follow from constants and shapes."""
        known = [each for each in inputs if each is not None]
        if node.op_type == "Constant" and node.attribute[0].name == "value":
            return [self._add_tensor(node.output[0], node.attribute[0].t)]
        if node.op_type == "Shape" and known[0].shape is not None:
            part = {attribute.name: attribute.i for attribute in node.attribute}
            extents = known[0].shape[part.get("start") : part.get("end")]
            return [Value.of_values(np.array(extents, np.int64))]
        is_constant, is_random = node.op_type == "Constant", node.op_type in _RANDOM
        constants = known and all(each.is_known or each.is_counted for each in known)
        if is_constant or (constants and not is_random):
            made = sum(each.size_bytes for each in answers)
            most = max(costs.KEPT_BYTES, sum(each.size_bytes for each in known))
            if made <= most:
                self._budget.add_constant(made, node)
                self._left_bytes -= made
                if self._left_bytes < 0:
                    raise _UncountedError
            if self._counts and (made > _FEW_BYTES or any(each.is_counted for each in known)):
                return [replace(each, is_counted=made <= most) for each in answers]
            # a type such as int4, which only constants have, is decoded whatever that takes
            if is_constant or any(str(each.array().dtype) not in TYPES for each in known):
                most = costs.memory_bytes()
            values = self._run(node) if made <= most else []
            if values and all(np.asarray(value).nbytes <= most for value in values):
                computed = [Value.of_values(np.asarray(value)) for value in values]
                if computed:
                    computed[0].product = self._product(node, inputs)
                return computed + answers[len(computed) :]
        return [_without_values(answer) for answer in answers]

    def _product(self, node: Any, inputs: Sequence[Value | None]) -> Product | None:
        """The whole numbers and scales of an operator's answer, None for anything else."""
        product = inputs[0].product if inputs and inputs[0] is not None else None
        if product is not None and node.op_type in MOVING:
            return product.moved(lambda values: self._run(node, {node.input[0]: values})[0])
        return product_of(node, [each.array() for each in inputs if each is not None])

    def _run(self, node: Any, changed: Mapping[str, Any] | None = None) -> list[Any]:
        """The outputs of one operator; none where the reference cannot compute it. `changed` has
        other values than those that are known."""
        names = [name for name in dict.fromkeys(node.input) if name]
        arrays = {name: self.values[name].array() for name in names} | dict(changed or {})
        inputs = [
            helper.make_tensor_value_info(
                name, helper.np_dtype_to_tensor_dtype(array.dtype), array.shape
            )
            for name, array in arrays.items()
        ]
        outputs = [helper.make_tensor_value_info(name, 0, None) for name in node.output]
        single = helper.make_model(
            helper.make_graph([node], "one", inputs, outputs),
            opset_imports=self._model.opset_import,
            ir_version=self._model.ir_version,
        )
        try:
            return list(evaluator(single).run(None, arrays))
        except Exception:  # its operators raise whatever they do; the operator stays
            return []

    def _known(self, name: str) -> Any:
        """The values of a name, None if they are not known or there is none."""
        value = self.values.get(name, UNKNOWN)
        return value.array() if value.is_known else None

    def _branch(self, node: Any) -> bool:
        condition = self._known(node.input[0])
        if condition is None:
            return False
        if condition.size != 1:
            why = f"its condition has {counted(condition.size, 'value')}"
            raise Refusal.of(node, why, "a condition is one value: correct it, and export it again")
        taken = "then_branch" if condition.item() else "else_branch"
        body = next(attribute.g for attribute in node.attribute if attribute.name == taken)
        outputs = self._body(body, f"{_first(node)}/", {})
        self._name(outputs, node.output)
        return True

    def _loop(self, node: Any) -> bool:
        """Unroll a loop; False if values that are not known may end it, or if it has no iteration
        and so no values to stack."""
        body = next(attribute.g for attribute in node.attribute if attribute.name == "body")
        trips, going, *carried = [*node.input, "", ""][: max(len(node.input), 2)]
        limit, goes = self._known(trips), self._known(going)
        if (trips and limit is None) or (going and goes is None):
            return False
        count = int(limit.item()) if trips else costs.MAX_OPERATORS + 1
        if going and not goes.item():
            count = 0
        states, each = len(body.input) - 2, costs.size_of(body)
        kept: list[list[str]] = [[] for _ in body.output[1 + states :]]
        if count < 1 and kept:
            return False
        if _goes_on(body):
            self._budget.check_iterations(node, each, count)
        before = len(self._nodes)
        for number in range(count):
            self._budget.check_iterations(node, each, 1)
            prefix = f"{_first(node)}/{number}/"
            names = [
                self._add_values(prefix + "number", np.int64(number)),
                self._add_values(prefix + "going", np.bool_(True)),
                *carried,
            ]
            bound = dict(zip((value.name for value in body.input), names, strict=True))
            condition, *outputs = self._body(body, prefix, bound)
            carried = outputs[:states]
            for values_of, name in zip(kept, outputs[states:], strict=True):
                values_of.append(name)
            goes = self._known(condition)
            if goes is None:
                del self._nodes[before:]
                return False
            if not goes.item():
                break
        self._name(carried, node.output[:states])
        for name, values_of in zip(node.output[states:], kept, strict=False):
            self._stack(values_of, name)
        return True

    def _scan(self, node: Any) -> bool:
        """Unroll a scan; False if its length is not known, or it has no iteration."""
        attributes = {each.name: helper.get_attribute_value(each) for each in node.attribute}
        body, scanned = attributes["body"], attributes["num_scan_inputs"]
        states, sources = len(body.input) - scanned, node.input[-scanned:]
        results = len(body.output) - states
        axes = attributes.get("scan_input_axes") or [0] * scanned
        ways = attributes.get("scan_input_directions") or [0] * scanned
        shape = self.values.get(sources[0], UNKNOWN).shape
        if len(node.input) != len(body.input) or shape is None:
            return False  # before opset 9 the first input are lengths of sequences
        count = shape[axes[0]]
        if count < 1:
            return False
        self._budget.check_iterations(node, costs.size_of(body), count)
        carried = list(node.input[:states])
        kept: list[list[str]] = [[] for _ in range(results)]
        for number in range(count):
            prefix, parts = f"{_first(node)}/{number}/", list[str]()
            for place, (source, axis, back) in enumerate(zip(sources, axes, ways, strict=True)):
                index = np.int64(count - 1 - number if back else number)
                at = self._add_values(f"{prefix}at/{place}", index)
                parts.append(f"{prefix}part/{place}")
                self.run([helper.make_node("Gather", [source, at], [parts[-1]], axis=axis)])
            names = [value.name for value in body.input]
            outputs = self._body(body, prefix, dict(zip(names, [*carried, *parts], strict=True)))
            carried = outputs[:states]
            for values_of, name in zip(kept, outputs[states:], strict=True):
                values_of.append(name)
        self._name(carried, node.output[:states])
        out_axes = attributes.get("scan_output_axes") or [0] * results
        out_ways = attributes.get("scan_output_directions") or [0] * results
        for name, values_of, axis, back in zip(
            node.output[states:], kept, out_axes, out_ways, strict=True
        ):
            self._stack(values_of[::-1] if back else values_of, name, axis)
        return True

    def _body(self, body: Any, prefix: str, bound: Mapping[str, str]) -> list[str]:
        """Write out a body; returns the names of its outputs."""
        inside = Inside(body, prefix, bound)
        self._budget.operators += len(inside.constants)
        for name, tensor in inside.constants.items():
            self._add_tensor(name, tensor)
        self.run(inside.nodes)
        return inside.outputs

    def _name(self, values: Sequence[str], names: Sequence[str]) -> None:
        """Give values the names that the graph has for them."""
        self.run(
            helper.make_node("Identity", [value], [name])
            for value, name in zip(values, names, strict=False)
            if name
        )

    def _stack(self, values: Sequence[str], name: str, axis: int = 0) -> None:
        """Stack the values of all iterations along a new axis."""
        if not name:
            return
        parts = [f"{name}/{number}" for number in range(len(values))]
        for value, part in zip(values, parts, strict=True):
            if self._opset < _AXES_ARE_INPUTS:
                self.run([helper.make_node("Unsqueeze", [value], [part], axes=[axis])])
            else:
                axes = self._add_values(f"{part}/axes", np.array([axis], np.int64))
                self.run([helper.make_node("Unsqueeze", [value, axes], [part])])
        self.run([helper.make_node("Concat", parts, [name], axis=axis)])


_WRITERS: Mapping[str, Callable[[_Walk, Any], bool]] = {
    "If": _Walk._branch,
    "Loop": _Walk._loop,
    "Scan": _Walk._scan,
}


def _first(node: Any) -> str:
    """The first name that an operator's outputs have."""
    return next(filter(None, node.output), "")


def _without_values(value: Value) -> Value:
    """The same; a tensor of no values is a constant. TVM's sum of none is what was in memory."""
    if 0 in (value.shape or ()) and value.kind not in (0, onnx.TensorProto.STRING):
        value.values = np.zeros(value.shape, helper.tensor_dtype_to_np_dtype(value.kind))
    return value


def _goes_on(body: Any) -> bool:
    """Whether no iteration ends a loop."""
    makers = {name: node for node in body.node for name in node.output}
    name = body.output[0].name
    while name in makers and makers[name].op_type in ("Identity", "Cast"):
        name = makers[name].input[0]
    if name == body.input[1].name:
        return True
    constants = {tensor.name: tensor for tensor in body.initializer}
    if name in makers and makers[name].op_type == "Constant":
        constants[name] = makers[name].attribute[0].t
    return name in constants and bool(np.all(numpy_helper.to_array(constants[name])))
