"""The estimate of what an ONNX model costs, before it is paid for: the sizes of its tensors and
constants, and the number of its operators once functions, branches and loops are written out.

A small file can say all of that: a Range of constants, a Concat of a tensor with itself 42 times,
functions that call the one before twice. Nothing is made for the estimate but few small values;
numbers are Python's, which do not overflow. What follows from values that are not known costs
nothing here: the limits of the process are the second wall. Imports onnx.
"""

from __future__ import annotations

import resource
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import numpy as np
from onnx import TensorProto, helper

from tuna.common import control_groups
from tuna.common.formats import size
from tuna_models.names import OWN_DOMAINS, title
from tuna_models.reading import loops, onnx_shapes
from tuna_models.reading.answers import UNDEFINED, answers_of
from tuna_models.reading.bodies import version_of
from tuna_models.reading.onnx_shapes import Call, Tensor, Unknown, attributes
from tuna_models.reading.small_values import OF_SHAPES, values
from tuna_models.refusals import CHANGE_HINT, DAMAGED, Refusal, Unsupported

#: Most operators of a model, with those of its functions, branches and loops written out.
MAX_OPERATORS = 1 << 15
#: Bytes up to which a computed constant is kept, unless its inputs have as many.
KEPT_BYTES = 16 << 20
#: Random operators, which have no constant answer.
RANDOM = frozenset(
    {
        *("RandomNormal", "RandomUniform", "RandomNormalLike", "RandomUniformLike"),
        *("Multinomial", "Bernoulli"),
    }
)
#: Most functions and bodies in each other.
_MAX_DEPTH = 64
#: Parts of the memory of the process: that one tensor may have, and all constants together.
_TENSOR_PART, _CONSTANTS_PART = 4, 2
#: Attributes of a Constant that are numbers, and NumPy's names of their types.
_NUMBERS = {
    **dict.fromkeys(("value_int", "value_ints"), "int64"),
    **dict.fromkeys(("value_float", "value_floats"), "float32"),
}


def memory_bytes() -> int:
    """Memory that this process may take: its own limit, else half of the machine's."""
    limit, _ = resource.getrlimit(resource.RLIMIT_DATA)
    return control_groups.memory_bytes() // 2 if limit == resource.RLIM_INFINITY else limit


def refuse_costly(model: Any, file_bytes: int) -> None:
    """Raise Refusal for a model, in a file of so many bytes, that would take too much memory or has
    too many operators, and for numbers that an operator cannot have, such as a step of 0.

    Its operators are in order, and the shapes of its inputs are fixed as far as they are known.
    """
    _Estimate(model, file_bytes).tensors()


class _Scope:
    """Values by name in a graph, and its function's attributes and version of operators."""

    def __init__(self, opset: int, bound: Mapping[str, Any], outer: _Scope | None = None) -> None:
        self.opset, self.bound = opset, bound
        self.tensors = dict[str, Tensor]()
        self._outer = outer

    def find(self, name: str) -> Tensor:
        """A value of this graph or one around it; one of which nothing is known for another."""
        scope: _Scope | None = self
        while scope is not None:
            if name in scope.tensors:
                return scope.tensors[name]
            scope = scope._outer
        return Tensor()

    def inside(self) -> _Scope:
        """The scope of a body."""
        return _Scope(self.opset, self.bound, self)


class _Estimate:
    """A walk through the operators in the order in which they run."""

    def __init__(self, model: Any, file_bytes: int) -> None:
        self._model, self._file_bytes = model, file_bytes
        memory = memory_bytes()
        self._tensor_bytes = memory // _TENSOR_PART
        self._constants_bytes = memory // _CONSTANTS_PART
        self._functions = {(each.domain, each.name): each for each in model.functions}
        self._counts: dict[tuple[str, str], int] = {}
        self._stated_bytes = 0  #: bytes of the constants that the file should hold
        self._constant_bytes = 0  #: bytes of all constants, those that are computed too
        self._operators = 0  #: operators that were looked at

    def tensors(self) -> Mapping[str, Tensor]:
        """What is known of the values of the graph, by name; raises Refusal."""
        graph = self._model.graph
        counts = [self._count([node]) for node in graph.node]
        if sum(counts) > MAX_OPERATORS:
            largest = graph.node[counts.index(max(counts))]
            raise Refusal(
                f"with its functions written out it has {_number(sum(counts))} operators, and"
                f" {MAX_OPERATORS:,} are the most ({_number(max(counts))} of the operator"
                f" {title(largest)})",
                "export it in parts, or with smaller functions",
            )
        scope = _Scope(version_of(self._model, ""), {})
        for value in graph.input:
            tensor = value.type.tensor_type
            fixed = tensor.HasField("shape") and all(
                extent.HasField("dim_value") for extent in tensor.shape.dim
            )
            shape = tuple(extent.dim_value for extent in tensor.shape.dim) if fixed else None
            scope.tensors[value.name] = Tensor(tensor.elem_type, shape)
            self._check_size(scope.tensors[value.name], f"its input {value.name} is")
        self._graph(graph, scope)
        return scope.tensors

    def _count(self, nodes: Iterable[Any], depth: int = 0) -> int:
        """The number of operators with functions and bodies written out, each loop once."""
        total = 0
        for node in nodes:
            operator = node.op_type
            if operator not in _BODIES and not self._functions:
                total += 1
                continue
            if depth > _MAX_DEPTH:
                raise Refusal(
                    f"its functions call themselves, or more than {_MAX_DEPTH} others in each"
                    f" other (the operator {title(node)})",
                    "export it with simpler functions",
                )
            key = (node.domain, operator)
            if key in self._functions:
                if key not in self._counts:
                    self._counts[key] = self._count(self._functions[key].node, depth + 1)
                total += self._counts[key]
                continue
            total += 1
            for attribute in node.attribute:
                if attribute.type == attribute.GRAPH:
                    total += self._size(attribute.g, depth + 1)
        return total

    def _size(self, body: Any, depth: int = 0) -> int:
        """The number of operators of a body, and of its constants, which are copied as well."""
        return self._count(body.node, depth) + len(body.initializer)

    def _graph(self, graph: Any, scope: _Scope) -> None:
        """Add the values of a graph, or of a function, to its scope."""
        for proto in getattr(graph, "initializer", ()):
            scope.tensors[proto.name] = self._constant(proto, proto.name)
        for sparse in getattr(graph, "sparse_initializer", ()):
            name = sparse.values.name
            scope.tensors[name] = self._sparse(sparse, name)
        tensors, nodes = scope.tensors, graph.node
        self._operators += len(nodes)
        for node in nodes:
            try:
                answers = self._node(node, scope)
            except UNDEFINED:
                answers = []
            except Unsupported as error:
                raise Refusal.of(node, str(error), CHANGE_HINT) from None
            for number, name in enumerate(node.output):
                tensors[name] = answers[number] if number < len(answers) else Tensor()

    def _node(self, node: Any, scope: _Scope) -> Sequence[Tensor]:
        """The outputs of an operator, as far as they are known; raises what rules raise."""
        tensors, operator, domain = scope.tensors, node.op_type, node.domain
        inputs = [(tensors.get(name) or scope.find(name)) if name else None for name in node.input]
        if self._functions and (domain, operator) in self._functions:
            return self._called(node, inputs, scope)
        if domain not in OWN_DOMAINS:
            return []
        if operator == "Constant":
            return [self._stated(node, scope)]
        if operator in _BODIES:
            return _BODIES[operator](self, node, inputs, scope)
        call = Call(node, inputs, scope.opset, scope.bound)
        answers = answers_of(call)
        constant = operator not in RANDOM
        if operator not in OF_SHAPES:
            for tensor in inputs:
                constant = constant and (tensor is None or tensor.constant)
        for answer in answers:
            answer.constant = constant
            if not inputs or inputs[0] is None or answer.shape is not inputs[0].shape:
                self._check_size(answer, node)
        if constant:
            if answers[0].shape is not None and answers[0].values is None:
                answers[0].values = values(call, answers[0].shape)
            made = sum(answer.size_bytes for answer in answers)
            given = sum(tensor.size_bytes for tensor in inputs if tensor is not None)
            if made <= max(KEPT_BYTES, given):  # `fold` keeps no larger one
                self._add_constant(made, node)
        return answers

    def _constant(self, proto: Any, name: str) -> Tensor:
        """A constant of the file; raises Refusal for one that the file does not hold."""
        tensor = Tensor(proto.data_type, tuple(proto.dims), proto, constant=True)
        if proto.data_type == TensorProto.STRING:
            return tensor
        needed = held = tensor.size_bytes
        if proto.HasField("raw_data"):
            self._stated_bytes += needed
            # only where the file is too short for all, as asking for the length copies the data
            if self._stated_bytes > self._file_bytes:
                held = len(proto.raw_data)
        elif proto.data_location != TensorProto.EXTERNAL:
            held = onnx_shapes.held_bytes(proto)
        if held < needed:
            raise Refusal(
                f"its constant {name} has the shape {tensor.shape}, which is {size(needed)}, and"
                f" the file holds {size(held)} of it",
                DAMAGED,
            )
        self._check_size(tensor, f"its constant {name} is")
        self._add_constant(needed, name)
        return tensor

    def _sparse(self, proto: Any, name: str) -> Tensor:
        tensor = Tensor(proto.values.data_type, tuple(proto.dims), constant=True)
        self._check_size(tensor, f"its constant {name} is")
        self._add_constant(tensor.size_bytes, name)
        return tensor

    def _stated(self, node: Any, scope: _Scope) -> Tensor:
        """The answer of a Constant."""
        given = attributes(node.attribute, scope.bound)
        if "value" in given:
            return self._constant(given["value"], node.output[0])
        if "sparse_value" in given:
            return self._sparse(given["sparse_value"], node.output[0])
        name = next(name for name in given if name in _NUMBERS)
        array = np.array(given[name], _NUMBERS[name])
        kind = helper.np_dtype_to_tensor_dtype(array.dtype)
        return Tensor(kind, array.shape, values=array, constant=True)

    def _called(self, node: Any, inputs: Sequence[Tensor | None], scope: _Scope) -> list[Tensor]:
        """The outputs of a function."""
        function = self._functions[node.domain, node.op_type]
        bound = attributes(function.attribute_proto, {})
        bound |= attributes(node.attribute, scope.bound)
        inside = _Scope(version_of(function, ""), bound)
        for name, tensor in zip(function.input, inputs, strict=False):
            inside.tensors[name] = tensor or Tensor()
        self._graph(function, inside)
        return [inside.find(name) for name in function.output]

    def _branch(self, node: Any, inputs: Sequence[Any], scope: _Scope) -> list[Tensor]:
        """The outputs of the branch that an If takes; raises Unknown where that is not known."""
        taken = "then_branch" if inputs[0].numbers().item() else "else_branch"
        return self._body(attributes(node.attribute, {})[taken], (), scope)

    def _loop(self, node: Any, inputs: Sequence[Any], scope: _Scope) -> list[Tensor]:
        """The outputs of a Loop, iteration by iteration; raises Unknown where values that are not
        known end it."""
        trips, going, *states = [*inputs, None, None][: max(len(inputs), 2)]
        count = MAX_OPERATORS + 1 if trips is None else int(trips.numbers().item())
        if going is not None and not going.numbers().item():
            count = 0
        body = attributes(node.attribute, {})["body"]
        each = self._size(body)
        if loops.goes_on(body):
            self._check_iterations(node, each, count)
        rows = list[Sequence[Tensor]]()
        for number in range(count):
            self._check_iterations(node, each, 1)
            counter = Tensor(TensorProto.INT64, (), values=np.array(number), constant=True)
            goes = Tensor(TensorProto.BOOL, (), values=np.array(True), constant=True)
            condition, *answers = self._body(body, (counter, goes, *states), scope)
            rows.append(answers[len(states) :])
            states = answers[: len(states)]
            if not condition.numbers().item():
                break
        return [*states, *self._stacked(node, rows, ())]

    def _scan(self, node: Any, inputs: Sequence[Any], scope: _Scope) -> list[Tensor]:
        """The outputs of a Scan; raises Unknown where its length is not known."""
        given = attributes(node.attribute, {})
        body, scanned = given["body"], given["num_scan_inputs"]
        if len(inputs) != len(body.input):
            raise Unknown  # before opset 9 the first input are lengths of sequences
        states, parts = list(inputs[:-scanned]), list[Tensor]()
        axes, counts = given.get("scan_input_axes") or [0] * scanned, list[int]()
        for source, axis in zip(inputs[-scanned:], axes, strict=True):
            shape = list(onnx_shapes.known(source.shape))
            counts.append(shape.pop(axis))
            parts.append(Tensor(source.kind, tuple(shape), constant=source.constant))
        self._check_iterations(node, self._size(body), counts[0])
        rows = list[Sequence[Tensor]]()
        for _ in range(counts[0]):
            answers = self._body(body, (*states, *parts), scope)
            rows.append(answers[len(states) :])
            states = answers[: len(states)]
        return [*states, *self._stacked(node, rows, given.get("scan_output_axes") or ())]

    def _stacked(
        self, node: Any, rows: Sequence[Sequence[Tensor]], axes: Sequence[int]
    ) -> list[Tensor]:
        """The values of all iterations along new axes, by default the first."""
        made = []
        for number, tensor in enumerate(rows[0] if rows else ()):
            shape = list(onnx_shapes.known(tensor.shape))
            axis = axes[number] if axes else 0
            shape.insert(axis if axis >= 0 else len(shape) + 1 + axis, len(rows))
            made.append(Tensor(tensor.kind, tuple(shape)))
            self._check_size(made[-1], node)
        return made

    def _body(self, body: Any, given: Sequence[Tensor], scope: _Scope) -> list[Tensor]:
        """The outputs of a branch, or of an iteration of a loop."""
        inside = scope.inside()
        for value, tensor in zip(body.input, given, strict=False):
            inside.tensors[value.name] = tensor
        self._operators += len(body.initializer)
        self._graph(body, inside)
        return [inside.find(value.name) for value in body.output]

    def _check_iterations(self, node: Any, each: int, count: int) -> None:
        """Raise Refusal where so many more iterations of `each` operators are too many."""
        if self._operators + count * each > MAX_OPERATORS:
            raise Refusal.said_of(
                node,
                f"has {_number(count)} more iterations of {_number(each)} operators each, and"
                f" {MAX_OPERATORS:,} operators are the most",
                "export it with fewer iterations",
            )

    def _check_size(self, tensor: Tensor, what: Any) -> None:
        """Raise Refusal for too large a tensor, of a node or of what a phrase says."""
        if tensor.shape is not None and (needed := tensor.size_bytes) > self._tensor_bytes:
            much = f"a tensor of {size(needed)}, and {size(self._tensor_bytes)} are the most"
            hint = _hint(_TENSOR_PART)
            if isinstance(what, str):
                raise Refusal(f"{what} {much}", hint)
            raise Refusal.said_of(what, f"makes {much}", hint)

    def _add_constant(self, made_bytes: int, what: Any) -> None:
        """Raise Refusal for the constant, of a node or of this name, that is one too much."""
        self._constant_bytes += made_bytes
        if self._constant_bytes > self._constants_bytes:
            last = (
                f"the constant {what}" if isinstance(what, str) else f"the operator {title(what)}"
            )
            raise Refusal(
                f"its constants with those that are computed, up to {last}, have"
                f" {size(self._constant_bytes)}, and {size(self._constants_bytes)} are the most",
                _hint(_CONSTANTS_PART),
            )


_BODIES = {"If": _Estimate._branch, "Loop": _Estimate._loop, "Scan": _Estimate._scan}


def _hint(part: int) -> str:
    return (
        f"that is 1/{part} of the memory of an import, which TUNA_MODEL_MEMORY_MIB sets, and"
        " TUNA_REQUEST_MEMORY_MIB in a service"
    )


def _number(count: int) -> str:
    return f"{count:,}" if count < 10**15 else "more than 10^15"
