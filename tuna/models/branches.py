"""Unrolls branches and loops of an ONNX graph that shapes and constants decide. Imports onnx."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

import numpy as np
from onnx import helper, numpy_helper

#: Most operators of an unrolled loop.
_LARGEST = 1 << 14


def subgraphs(node: Any) -> Iterator[Any]:
    """The graphs that an operator has as attributes."""
    for attribute in node.attribute:
        if attribute.HasField("g"):
            yield attribute.g
        yield from attribute.graphs


def names_read(node: Any) -> Iterator[str]:
    """Yield the names that an operator and its graphs read, including those defined there."""
    yield from node.input
    for graph in subgraphs(node):
        yield from (value.name for value in graph.output)
        for inner in graph.node:
            yield from names_read(inner)


def write_out(graph: Any, known: Mapping[str, Any]) -> bool:
    """Replace each branch and loop that `known` values decide; return whether there was any."""
    nodes: list[Any] = []
    for node in graph.node:
        writer = _WRITERS.get(node.op_type)
        found = writer(graph, node, known) if writer is not None else None
        nodes += [node] if found is None else found
    changed = len(nodes) != len(graph.node) or any(
        one is not other for one, other in zip(nodes, graph.node, strict=False)
    )
    if changed:
        copies = [type(node).FromString(node.SerializeToString()) for node in nodes]
        del graph.node[:]
        graph.node.extend(copies)
    return changed


def _branch(graph: Any, node: Any, known: Mapping[str, Any]) -> list[Any] | None:
    if node.input[0] not in known:
        return None
    taken = "then_branch" if np.asarray(known[node.input[0]]).item() else "else_branch"
    body = next(attribute.g for attribute in node.attribute if attribute.name == taken)
    inside = _Inside(graph, body, f"{node.output[0]}/", {})
    return inside.nodes + _named(inside.outputs, node.output)


def _loop(graph: Any, node: Any, known: Mapping[str, Any]) -> list[Any] | None:
    """Unroll a loop; None if it may end early, or has no iteration and so no values to stack."""
    body = next(attribute.g for attribute in node.attribute if attribute.name == "body")
    trips, going, *carried = [*node.input, "", ""][: max(len(node.input), 2)]
    if trips not in known or (going and going not in known) or not _goes_on(body):
        return None
    runs = not going or np.asarray(known[going]).item()
    count = int(np.asarray(known[trips]).item()) if runs else 0
    states = len(body.input) - 2
    kept: list[list[str]] = [[] for _ in body.output[1 + states :]]
    if count * len(body.node) > _LARGEST or (count < 1 and kept):
        return None
    nodes: list[Any] = []
    for number in range(count):
        prefix = f"{node.output[0]}/{number}/"
        values = {"number": np.int64(number), "going": np.bool_(True)}
        for name, value in values.items():
            graph.initializer.append(numpy_helper.from_array(np.asarray(value), prefix + name))
        names = [prefix + "number", prefix + "going", *carried]
        given = dict(zip((value.name for value in body.input), names, strict=True))
        inside = _Inside(graph, body, prefix, given)
        nodes += inside.nodes
        carried = inside.outputs[1 : 1 + states]
        for values_of, name in zip(kept, inside.outputs[1 + states :], strict=True):
            values_of.append(name)
    nodes += _named(carried, node.output[:states])
    for name, values_of in zip(node.output[states:], kept, strict=False):
        nodes += _stacked(graph, values_of, name)
    return nodes


_WRITERS: Mapping[str, Callable[[Any, Any, Mapping[str, Any]], list[Any] | None]] = {
    "If": _branch,
    "Loop": _loop,
}
OPERATORS = frozenset(_WRITERS)


class _Inside:
    """A copy of the operators of a body, for the graph around it."""

    def __init__(self, graph: Any, body: Any, prefix: str, given: Mapping[str, str]) -> None:
        """`given` maps the body's inputs to outer names; names of the body get the prefix."""
        defined = {name for node in body.node for name in node.output if name}
        defined |= {tensor.name for tensor in body.initializer}
        names = {**{name: prefix + name for name in defined}, **given}
        for tensor in body.initializer:
            copy = type(tensor)()
            copy.CopyFrom(tensor)
            copy.name = names[tensor.name]
            graph.initializer.append(copy)
        self.nodes = [_renamed(node, names, prefix) for node in body.node]
        self.outputs = [names.get(value.name, value.name) for value in body.output]


def _renamed(node: Any, names: Mapping[str, str], prefix: str = "") -> Any:
    copy = type(node)()
    copy.CopyFrom(node)
    copy.name = prefix + copy.name if copy.name else ""
    for field in (copy.input, copy.output):
        field[:] = [names.get(name, name) for name in field]
    for graph in subgraphs(copy):
        _rename_free(graph, names)
    return copy


def _rename_free(graph: Any, names: Mapping[str, str]) -> None:
    """Rename the outer values that a graph reads."""
    own = {value.name for value in graph.input} | {tensor.name for tensor in graph.initializer}
    own |= {name for node in graph.node for name in node.output}
    outer = {name: other for name, other in names.items() if name not in own}
    for value in graph.output:
        value.name = outer.get(value.name, value.name)
    nodes = [_renamed(node, outer) for node in graph.node]
    del graph.node[:]
    graph.node.extend(nodes)


def _named(values: Sequence[str], names: Sequence[str]) -> list[Any]:
    """Give values the names that the graph has for them."""
    return [
        helper.make_node("Identity", [value], [name])
        for value, name in zip(values, names, strict=False)
        if name
    ]


def _stacked(graph: Any, values: Sequence[str], name: str) -> list[Any]:
    """Stack the values of all iterations along a new first axis."""
    if not name:
        return []
    shape = f"{name}/one"
    graph.initializer.append(numpy_helper.from_array(np.array([0], np.int64), shape))
    parts = [f"{name}/{number}" for number in range(len(values))]
    nodes = [
        helper.make_node("Unsqueeze", [value, shape], [part])
        for value, part in zip(values, parts, strict=True)
    ]
    return [*nodes, helper.make_node("Concat", parts, [name], axis=0)]


def _goes_on(body: Any) -> bool:
    """Whether no iteration ends the loop."""
    makers = {name: node for node in body.node for name in node.output}
    name = body.output[0].name
    while name in makers and makers[name].op_type in ("Identity", "Cast"):
        name = makers[name].input[0]
    if name == body.input[1].name:
        return True
    constants = {tensor.name: numpy_helper.to_array(tensor) for tensor in body.initializer}
    maker = makers.get(name)
    if maker is not None and maker.op_type == "Constant":
        constants[name] = numpy_helper.to_array(maker.attribute[0].t)
    return name in constants and bool(np.all(constants[name]))
