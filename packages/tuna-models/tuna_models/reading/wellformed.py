"""Faults of an ONNX graph that are seen without inference: values that nothing makes or that are
made twice, constants, functions, operators that are not as ONNX defines them. Imports onnx."""

from __future__ import annotations

import graphlib
import math
from collections import ChainMap
from collections.abc import Iterable, Mapping, MutableMapping
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import onnx
from onnx import TensorProto, helper

from tuna_models.names import OWN_DOMAINS, operator_name, quoted, title
from tuna_models.reading import operator_forms
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
    """The fault of a constant, as the rest of a sentence; empty without one, and for values in
    another file, until they are read."""
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
            inputs, outputs = (0, len(function.input)), (0, len(function.output))
            for why in operator_forms.check_counts(node, inputs, outputs):
                raise Refusal.of(node, why, DAMAGED)
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
        if node.domain in OWN_DOMAINS:
            operator_forms.check(node, self.opset)


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
