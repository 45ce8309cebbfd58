"""Faults of an ONNX graph that are seen without inference: values that nothing makes or that are
made twice, numbers of inputs and outputs, attributes, constants, functions. Imports onnx."""

from __future__ import annotations

import graphlib
import math
import re
from collections import ChainMap
from collections.abc import Callable, Iterable, Mapping, MutableMapping
from dataclasses import dataclass
from functools import cache, cached_property
from typing import Any

import onnx
from onnx import AttributeProto, TensorProto, defs, helper

from tuna.common.messages import counted
from tuna_models.names import OWN_DOMAINS, operator_name, quoted, title
from tuna_models.reading.bodies import all_nodes, subgraphs, version_of
from tuna_models.reading.known import BITS
from tuna_models.refusals import DAMAGED, Refusal

_REMOVED = "a tool removed or renamed what made it: export the model again"
_RENAME = "give each value a name of its own"
#: Types whose values are not counted: texts, and those that are refused anyhow
_UNCOUNTED = ("STRING", "FLOAT6E2M3", "FLOAT6E3M2")
#: Name, bits of a value, and field of the values of each type, by its number
_TYPES = {
    number: (
        name,
        0 if name in _UNCOUNTED else BITS[number],
        helper.tensor_dtype_to_field(number),
    )
    for name, number in TensorProto.DataType.items()
    if number
}
#: A term of an Einsum's equation
_TERM = re.compile(r"[A-Za-z ]*(?:\.\.\.[A-Za-z ]*)?")
#: More axes than a tensor has: NumPy does not end for some far larger numbers
_MAX_AXES = 64
#: A number of inputs or outputs that stands for any number
_ANY = 1 << 30


def check(model: Any) -> None:
    """Raise Refusal for the first fault of a model, its functions and the graphs inside; its texts
    are checked (`check_texts`)."""
    _check_calls(model)
    functions = {(each.domain, each.name): each for each in model.functions}
    for function in model.functions:
        makers = dict.fromkeys(function.input, "an input")
        _Checker(function, functions).nodes(function.node, makers, {})
        for name in function.output:
            if name not in makers:
                operator = operator_name(function.domain, function.name)
                why = f"no operator of its function {operator} makes {quoted(name)}"
                raise Refusal(why, _REMOVED)
    _Checker(model, functions).graph(model.graph, {})
    outputs = dict[str, str]()
    for value in model.graph.output:
        _add(outputs, value.name, "an output")
    if not outputs:
        raise Refusal("it has no outputs", _REMOVED)


def check_texts(model: Any) -> None:
    """Raise Refusal for names that are no UTF-8, of which protobuf makes bytes."""
    graph = model.graph
    named = (*graph.input, *graph.output, *graph.initializer, *model.functions)
    _check_text(*(each.name for each in named))
    _check_text(*(each.domain for each in (*model.functions, *model.opset_import)))
    for scope in (graph, *model.functions):
        for node in all_nodes(scope):
            _check_text(node.op_type, node.domain, node.name, *node.input, *node.output)
            for each in node.attribute:
                _check_text(each.name, each.ref_attr_name)
                if each.HasField("g"):
                    _check_text(*(value.name for value in (*each.g.input, *each.g.output)))
    for each in model.functions:
        _check_text(*each.input, *each.output)


def _check_text(*texts: Any) -> None:
    try:
        "".join(texts)
    except TypeError:
        text = next(each for each in texts if not isinstance(each, str))
        raise Refusal(f"its name {bytes(text)[:40]!a} is no text (UTF-8)", DAMAGED) from None


def tensor_fault(tensor: Any) -> str:
    """What is wrong with a constant, as the rest of a sentence; empty where nothing is, and for
    values in another file, until they are read."""
    known = _TYPES.get(tensor.data_type)
    if known is None:
        return f"has the type {tensor.data_type}, which ONNX does not define"
    dims, (kind, bits, field) = tensor.dims, known
    if dims and min(dims) < 0:
        return f"has the shape {list(dims)}"
    if not bits or tensor.data_location == TensorProto.EXTERNAL:
        return ""
    count, unit = math.prod(dims), "bytes"
    needed = given = (count * bits + 7) // 8
    if not tensor.HasField("raw_data"):
        given, unit = len(getattr(tensor, field)), "values"
        needed = needed if bits < 8 else count * (1 + kind.startswith("COMPLEX"))
    else:
        given = len(tensor.raw_data)
    if given == needed:
        return ""
    return f"has {given} {unit} where the shape {list(dims)} of {kind} needs {needed}"


def _check_calls(model: Any) -> None:
    """Refuse two functions of one name, and functions that call themselves."""
    calls = dict[tuple[str, str], set[tuple[str, str]]]()
    for each in model.functions:
        if (each.domain, each.name) in calls:
            name = operator_name(each.domain, each.name)
            raise Refusal(f"it has two functions of the name {name}", _RENAME)
        calls[each.domain, each.name] = {(node.domain, node.op_type) for node in each.node}
    try:
        graphlib.TopologicalSorter(calls).prepare()
    except graphlib.CycleError as error:
        names = ", ".join(operator_name(*name) for name in error.args[1][:5])
        hint = "write a loop as Loop or Scan"
        raise Refusal(f"its functions call themselves: {names}", hint) from None


@dataclass(frozen=True)
class _Checker:
    """Checks graphs whose operators are of the opsets of a model or function, `scope`."""

    scope: Any
    functions: Mapping[tuple[str, str], Any]

    @cached_property
    def opset(self) -> int:
        """The version of ONNX's own operators."""
        return version_of(self.scope, "")

    def graph(self, graph: Any, outer: MutableMapping[str, Any], node: Any = None) -> None:
        """Check a graph, the model's or that inside of a node, which may read the values of
        `outer`, too."""
        makers = dict[str, Any]()
        for value in graph.input:
            _add(makers, value.name, "an input")
        constants = dict[str, str]()
        for tensor in graph.initializer:
            _add(constants, tensor.name, "a constant")
            if fault := tensor_fault(tensor):
                raise Refusal(f"the constant {quoted(tensor.name)} {fault}", DAMAGED)
        for sparse in graph.sparse_initializer:
            raise Refusal(
                f"the constant {quoted(sparse.values.name)} is sparse",
                "write it as a dense one, which takes more room in the file",
            )
        _check_defaults(graph)
        makers = {**constants, **makers}
        self.nodes(graph.node, makers, outer)
        for value in graph.output:
            if value.name not in makers and value.name not in outer:
                why = f"nothing makes its output {quoted(value.name)}"
                if node is not None:
                    raise Refusal.of(node, f"in a graph inside {why}", _REMOVED)
                raise Refusal(why, _REMOVED)

    def nodes(
        self, nodes: Iterable[Any], makers: dict[str, Any], outer: MutableMapping[str, Any]
    ) -> None:
        """Check operators in any order, and add the values that they make to `makers`."""
        for node in nodes:
            for name in filter(None, node.output):
                _add(makers, name, node)
        known = ChainMap(makers, outer)
        for node in nodes:
            for name in node.input:
                if name and name not in makers and name not in outer:
                    why = f"it reads {quoted(name)}, which nothing makes"
                    raise Refusal.of(node, why, _REMOVED)
            self._node(node)
            for graph in subgraphs(node):
                self.graph(graph, known, node)

    def _node(self, node: Any) -> None:
        if not node.op_type:
            raise Refusal(f"its node{title(node)} names no operator", DAMAGED)
        function = self.functions.get((node.domain, node.op_type))
        if function is not None:
            _check_count(node, "input", len(node.input), 0, len(function.input))
            _check_count(node, "output", len(node.output), 0, len(function.output))
            return
        for attribute in node.attribute:
            if attribute.ref_attr_name and not isinstance(self.scope, onnx.FunctionProto):
                why = f"its attribute {quoted(attribute.name)} is one of a function around it"
                raise Refusal.of(node, f"{why}, and there is none", DAMAGED)
            for tensor in [attribute.t] if attribute.HasField("t") else []:
                if fault := tensor_fault(tensor):
                    raise Refusal.of(
                        node, f"its attribute {quoted(attribute.name)} {fault}", DAMAGED
                    )
        if node.domain not in OWN_DOMAINS:
            return
        form = _form(node.op_type, self.opset)
        if form is not None:
            form.check(node)
            if node.op_type in _ARITIES:
                _ARITIES[node.op_type](node)


@dataclass(frozen=True)
class _Form:
    """The inputs, outputs and attributes of an operator in an opset."""

    inputs: tuple[int, int]
    outputs: tuple[int, int]
    needed: tuple[tuple[int, str], ...]  #: places and names of the inputs that cannot be absent
    #: place and name of the first of any number of inputs, none of which can be absent
    variadic: tuple[int, str] | None
    attributes: Mapping[str, int]  #: types by name
    required: frozenset[str]

    def check(self, node: Any) -> None:
        """Raise Refusal for another number of inputs or outputs, and other attributes."""
        _check_count(node, "input", len(node.input), *self.inputs)
        _check_count(node, "output", len(node.output), *self.outputs)
        for place, name in self.needed:
            if not node.input[place]:
                raise Refusal.of(node, f"its input {name} is absent", DAMAGED)
        if self.variadic and "" in node.input[self.variadic[0] :]:
            raise Refusal.of(node, f"one of its inputs {self.variadic[1]} is absent", DAMAGED)
        for attribute in node.attribute:
            name, kind = attribute.name, self.attributes.get(attribute.name)
            if kind is None and not name.startswith("__"):  # those are for tools
                why = f"it has the attribute {quoted(name)}, which this operator has not"
                raise Refusal.of(node, why, "remove it, or correct its name")
            if kind is not None and attribute.type not in (0, kind):
                words = AttributeProto.AttributeType.Name
                why = f"its attribute {name} is of type {words(attribute.type)}, not {words(kind)}"
                raise Refusal.of(node, why, DAMAGED)
            if name in ("axis", "axes") and any(
                abs(axis) > _MAX_AXES for axis in (attribute.i, *attribute.ints)
            ):
                raise Refusal.of(node, f"its {name} is no axis that a tensor has", DAMAGED)
        missing = self.required and self.required - {each.name for each in node.attribute}
        if missing:
            raise Refusal.of(node, f"it lacks the attribute {min(missing)}", DAMAGED)
        if node.op_type == "Constant" and len(node.attribute) != 1:
            has = counted(len(node.attribute), "value")
            raise Refusal.of(node, f"it has {has}, and a constant has one", DAMAGED)


@cache
def _form(operator: str, opset: int) -> _Form | None:
    """The form of one of ONNX's own operators; None where the opset has it not."""
    try:
        schema = defs.get_schema(operator, opset)
    except defs.SchemaError:
        return None
    options = defs.OpSchema.FormalParameterOption
    # onnxruntime's tools write DequantizeLinear with an axis in opsets before those that have it
    attributes = {**defs.get_schema(operator).attributes, **schema.attributes}
    return _Form(
        (schema.min_input, schema.max_input),
        (schema.min_output, schema.max_output),
        tuple(
            (place, given.name)
            for place, given in enumerate(schema.inputs[: schema.min_input])
            if given.option == options.Single
        ),
        next(
            (
                (place, given.name)
                for place, given in enumerate(schema.inputs)
                if given.option == options.Variadic
            ),
            None,
        ),
        {name: _number(each.type) for name, each in attributes.items()},
        frozenset(name for name, each in schema.attributes.items() if each.required),
    )


def _number(kind: Any) -> int:
    """The number of an attribute's type, as nodes have it."""
    return int(kind.value)


def _add(makers: dict[str, Any], name: str, maker: Any) -> None:
    """Add the maker of a value, an operator or words; raises Refusal for a second one, and for a
    value without a name."""
    if not name:
        raise Refusal(f"{maker} in it has no name", DAMAGED)
    if name in makers:
        one, other = (
            each if isinstance(each, str) else title(each) for each in (makers[name], maker)
        )
        words = f"{one} twice" if one == other else f"{one} and of {other}"
        raise Refusal(f"{quoted(name)} is the name of {words}", _RENAME)
    makers[name] = maker


def _check_defaults(graph: Any) -> None:
    """Refuse an input whose default, the constant of its name, is of another shape or type."""
    constants = {tensor.name: tensor for tensor in graph.initializer}
    for value in graph.input:
        tensor, declared = constants.get(value.name), value.type.tensor_type
        if tensor is None or not declared.HasField("shape"):
            continue
        shape = [
            each.dim_value if each.HasField("dim_value") else -1 for each in declared.shape.dim
        ]
        fits = len(shape) == len(tensor.dims) and all(
            extent in (-1, given) for extent, given in zip(shape, tensor.dims, strict=False)
        )
        if not fits or declared.elem_type not in (0, tensor.data_type):
            name = TensorProto.DataType.Name
            raise Refusal(
                f"{quoted(value.name)} is an input of shape {shape} and type"
                f" {name(declared.elem_type)}, and a constant of {list(tensor.dims)} and"
                f" {name(tensor.data_type)}",
                _RENAME,
            )


def _check_count(node: Any, noun: str, given: int, least: int, most: int) -> None:
    """Refuse another number of inputs or outputs than an operator takes."""
    if not least <= given <= most:
        words = str(least) if least == most else f"{least} to {most}"
        words = f"{least} or more" if most > _ANY else words
        raise Refusal.of(node, f"it has {counted(given, noun)}, and this operator {words}", DAMAGED)


def _graph_of(node: Any, name: str) -> Any:
    return next(attribute.g for attribute in node.attribute if attribute.name == name)


def _branches(node: Any) -> None:
    for name in ("then_branch", "else_branch"):
        given = len(_graph_of(node, name).output)
        if given != len(node.output):
            why = f"its {name} returns {counted(given, 'value')}, and it has {len(node.output)}"
            raise Refusal.of(node, why, DAMAGED)


def _loop(node: Any) -> None:
    body, states = _graph_of(node, "body"), max(len(node.input) - 2, 0)
    _check_body(node, body, 2 + states, 1 + len(node.output), states <= len(node.output))


def _scan(node: Any) -> None:
    body = _graph_of(node, "body")
    scanned = next(each.i for each in node.attribute if each.name == "num_scan_inputs")
    # before opset 9 the first input are lengths of sequences
    inputs = len(node.input)
    _check_body(
        node,
        body,
        len(body.input) if inputs == len(body.input) + 1 else inputs,
        len(node.output),
        0 < scanned <= inputs,
    )


def _check_body(node: Any, body: Any, inputs: int, outputs: int, fits: bool) -> None:
    if not fits or (len(body.input), len(body.output)) != (inputs, outputs):
        raise Refusal.of(
            node,
            f"its body takes {counted(len(body.input), 'value')} and returns"
            f" {len(body.output)}, which do not fit its {counted(len(node.input), 'input')} and"
            f" {counted(len(node.output), 'output')}",
            DAMAGED,
        )


def _equation(node: Any) -> None:
    text = next(each.s for each in node.attribute if each.name == "equation").decode(
        errors="replace"
    )
    left, _, right = text.partition("->")
    terms = left.split(",")
    if not all(_TERM.fullmatch(term) for term in (*terms, right)):
        why = (
            f"its equation {quoted(text)} has more than letters, commas, one -> and dots in threes"
        )
        raise Refusal.of(node, why, "write it as 'ij,jk->ik'")
    _check_count(node, "input", len(node.input), len(terms), len(terms))


_ARITIES: Mapping[str, Callable[[Any], None]] = {
    "Einsum": _equation,
    "If": _branches,
    "Loop": _loop,
    "Scan": _scan,
}
