"""The graphs inside of operators and functions, and copies of them for the graph around them."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

from tuna_models.names import OWN_DOMAINS

#: Operators with graphs inside, which are written out where known values decide them
WITH_BODIES = frozenset({"If", "Loop", "Scan"})


def constants_of(graph: Any) -> dict[str, Any]:
    """The tensors of a graph's constants by name, those of operators too."""
    found = {tensor.name: tensor for tensor in graph.initializer}
    for node in graph.node:
        if node.op_type == "Constant" and node.attribute and node.attribute[0].name == "value":
            found[node.output[0]] = node.attribute[0].t
    return found


def subgraphs(node: Any) -> Iterator[Any]:
    """The graphs that an operator has as attributes."""
    for attribute in node.attribute:
        if attribute.HasField("g"):
            yield attribute.g
        yield from attribute.graphs


def all_nodes(graph: Any) -> Iterator[Any]:
    """Yield the operators of a graph and of those inside of them."""
    for node in graph.node:
        yield node
        for inner in subgraphs(node):
            yield from all_nodes(inner)


def names_read(node: Any) -> Iterator[str]:
    """Yield the names that an operator and its graphs read, including those defined there."""
    yield from node.input
    for graph in subgraphs(node):
        yield from (value.name for value in graph.output)
        for inner in graph.node:
            yield from names_read(inner)


class Inside:
    """A copy of the operators of a body, for the graph around it."""

    def __init__(self, body: Any, prefix: str, given: Mapping[str, str]) -> None:
        """`given` maps the body's inputs to outer names; names of the body get the prefix.

        The body is a graph or a function.
        """
        weights = getattr(body, "initializer", ())
        defined = {name for node in body.node for name in node.output if name}
        defined |= {tensor.name for tensor in weights}
        names = {**{name: prefix + name for name in defined}, **given}
        self.constants = {names[tensor.name]: tensor for tensor in weights}
        self.nodes = [_renamed(node, names, prefix) for node in body.node]
        outputs = (getattr(value, "name", value) for value in body.output)
        self.outputs = [names.get(name, name) for name in outputs]


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


def version_of(model: Any, domain: str) -> int:
    """Return the version of a domain's operators, 0 if the model imports none."""
    same = OWN_DOMAINS if domain in OWN_DOMAINS else (domain,)
    return next((int(entry.version) for entry in model.opset_import if entry.domain in same), 0)
