"""Writes out functions: those of a model, and ONNX's operators that are functions of others.

ONNX defines many operators by a body of simpler ones. Those that TVM's importer lacks or gets wrong
are replaced by this body, with the node's attributes and their defaults in it.
"""

from __future__ import annotations

import functools
import heapq
from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import onnx
from onnx import defs, inliner

from tuna.common.messages import one_line
from tuna_models.names import NAME_CHARS, OWN_DOMAINS, operator_name, title
from tuna_models.operators import own_functions
from tuna_models.operators.conversion import converters_of_tvm
from tuna_models.reading import wellformed
from tuna_models.reading.bodies import (
    WITH_BODIES,
    Inside,
    all_nodes,
    names_read,
    subgraphs,
    version_of,
)
from tuna_models.reading.converters import OWN
from tuna_models.reading.known import UNKNOWN, Value
from tuna_models.refusals import CHANGE_HINT, REASON_CHARS, Refusal

#: Operators that TVM's importer has, but as another one than ONNX's.
_ALWAYS = frozenset({"Attention", "CastLike", "RMSNormalization"})
#: Operators that TVM's importer has for fp32 alone.
_FP32 = frozenset({"HardSigmoid", "ThresholdedRelu"})
#: Random operators and those of sequences stay: their bodies have operators that are no better.
_NEVER = frozenset({"Bernoulli", "SequenceMap"})
_DOMAINS = (*OWN_DOMAINS, "ai.onnx.preview")


def inlined(model: Any) -> Any:
    """Return the model with its own functions written out; raises Refusal where onnx cannot."""
    if not model.functions:
        return model
    model = _with_one_opset(model)
    try:
        model = inliner.inline_local_functions(model)
    except Exception as error:  # onnx's are of several kinds
        reason = one_line(str(error).rpartition("failed: ")[2], REASON_CHARS).rstrip(".")
        raise Refusal(f"its functions cannot be written out: {reason}", CHANGE_HINT) from error
    wellformed.check(model)  # arguments that a call leaves out are absent now
    return model


def _with_one_opset(model: Any) -> Any:
    """The model with functions of its own opset, without which onnx leaves their calls; raises
    Refusal for one of another opset, in which an operator of it is another."""
    copy, wanted = type(model)(), version_of(model, "")
    if all(version_of(function, "") == wanted for function in model.functions):
        return model
    copy.CopyFrom(model)
    for function in copy.functions:
        for entry in function.opset_import:
            if entry.domain not in OWN_DOMAINS or entry.version == wanted:
                continue
            for node in all_nodes(function):
                own = node.domain in OWN_DOMAINS
                if own and _form(node, entry.version) != _form(node, wanted):
                    name = operator_name(function.domain, function.name)
                    raise Refusal.of(
                        node,
                        f"it is in the function {name} of opset {entry.version}, and the model is"
                        f" of opset {wanted}, in which it is defined anew",
                        "export the model and its functions with one opset",
                    )
            entry.version = wanted
    return copy


def _form(node: Any, opset: int) -> Any:
    """The inputs, outputs and attributes of an operator as an opset defines it, by which a change
    of its meaning shows; None where the opset has it not."""
    try:
        schema = defs.get_schema(node.op_type, opset)
    except defs.SchemaError:
        return None
    attributes = {
        name: each.default_value.SerializeToString() for name, each in schema.attributes.items()
    }
    return attributes, *([each.name for each in of] for of in (schema.inputs, schema.outputs))


@functools.cache
def known_operators() -> frozenset[str]:
    """Return the names of ONNX's own operators that can be converted."""
    return frozenset({*converters_of_tvm(), *OWN, "Constant"})


def unsupported(nodes: Iterable[Any]) -> dict[str, list[str]]:
    """The names of the nodes of each operator that the importer does not know."""
    known = known_operators()
    found: dict[str, list[str]] = {}
    for node in nodes:
        if node.domain not in OWN_DOMAINS or node.op_type not in known:
            operator = one_line(operator_name(node.domain, node.op_type), NAME_CHARS)
            found.setdefault(operator, []).append(_title(node))
    return found


def _title(node: Any) -> str:
    """Return the node's name; for a branch or a loop also why it is not imported."""
    name = one_line(node.name or (node.output[0] if node.output else node.op_type), NAME_CHARS)
    return f"{name}, which depends on the input" if node.op_type in WITH_BODIES else name


def in_order(model: Any) -> Any:
    """Return the model with its operators behind those whose values they read; raises Refusal if
    there is no such order."""
    graph, nodes = model.graph, model.graph.node
    given = {each.name for each in (*graph.input, *graph.initializer)}
    given |= {"", *(tensor.values.name for tensor in graph.sparse_initializer)}
    makers = {name: place for place, node in enumerate(nodes) for name in node.output}
    makers = {name: place for name, place in makers.items() if name not in given}
    made = set[str]()
    for node in nodes:
        if any(name in makers and name not in made for name in names_read(node)):
            break
        made.update(node.output)
    else:
        return model
    waits, readers = [0] * len(nodes), defaultdict[int, list[int]](list)
    for place, node in enumerate(nodes):
        before = {makers[name] for name in names_read(node) if name in makers}
        waits[place] = len(before)
        for maker in before:
            readers[maker].append(place)
    ready = [place for place, count in enumerate(waits) if not count]
    heapq.heapify(ready)
    ordered = list[int]()
    while ready:
        place = heapq.heappop(ready)
        ordered.append(place)
        for reader in readers[place]:
            waits[reader] -= 1
            if not waits[reader]:
                heapq.heappush(ready, reader)
    if len(ordered) < len(nodes):
        waiting = [node for node, count in zip(nodes, waits, strict=True) if count][:5]
        names = ", ".join(map(title, waiting))
        raise Refusal(f"operators wait for each other's values: {names}", CHANGE_HINT)
    copy = type(model)()
    copy.CopyFrom(model)
    del copy.graph.node[:]
    copy.graph.node.extend(nodes[place] for place in ordered)
    return copy


def is_function(node: Any, opset: int) -> bool:
    """Whether the operator is written out, if its body can be made."""
    name = node.op_type
    if node.domain not in _DOMAINS or name in _NEVER:
        return False
    if node.domain in OWN_DOMAINS:
        if own_functions.has(node) or name in _FP32:
            return True
        if name in known_operators() and name not in _ALWAYS:
            return name == "LayerNormalization" and any(node.output[1:])
    schema = _schema(name, opset, node.domain)
    return schema is not None and (schema.has_function or schema.has_context_dependent_function)


@functools.cache
def _schema(operator: str, opset: int, domain: str) -> Any:
    try:
        return defs.get_schema(operator, opset, "" if domain in OWN_DOMAINS else domain)
    except defs.SchemaError:
        return None


def body_of(node: Any, inputs: Sequence[Value | None], opset: int) -> Any:
    """Return the function of a node for a set of operators, with its attributes filled in; None if
    it needs types that are not known."""
    schema = _schema(node.op_type, opset, node.domain)
    first = (inputs[0] if inputs else None) or UNKNOWN
    if own_functions.has(node):
        rank = len(first.type.tensor_type.shape.dim)
        return own_functions.body(node, rank, opset) if rank else None
    floats = first.kind in (0, onnx.TensorProto.FLOAT)
    if schema is None or (node.op_type in _FP32 and floats):
        return None
    if schema.has_function:
        version = max((at for at in schema.function_opset_versions if at <= opset), default=0)
        text = schema.get_function_with_opset_version(version) if version else b""
    else:
        if any(each is not None and not each.text for each in inputs):
            return None
        kinds = [b"" if each is None else each.text for each in inputs]
        versions = schema.context_dependent_function_opset_versions
        version = max((at for at in versions if at <= opset), default=0)
        make = schema.get_context_dependent_function_with_opset_version
        text = make(version, node.SerializeToString(), kinds) if version else b""
    if not text:
        return None
    body = onnx.FunctionProto.FromString(text)
    values = {
        name: attribute.default_value
        for name, attribute in schema.attributes.items()
        if attribute.default_value.type
    } | {attribute.name: attribute for attribute in node.attribute}
    _fill(body.node, values)
    return body


def _fill(nodes: Iterable[Any], values: Mapping[str, Any]) -> None:
    """Replace references to a function's attributes by their values."""
    for node in nodes:
        attributes = list(node.attribute)
        del node.attribute[:]
        for attribute in attributes:
            if not attribute.ref_attr_name:
                node.attribute.append(attribute)
            elif attribute.ref_attr_name in values:
                node.attribute.append(values[attribute.ref_attr_name])
                node.attribute[-1].name = attribute.name
        for graph in subgraphs(node):
            _fill(graph.node, values)


def written(node: Any, body: Any) -> list[Any]:
    """Return the operators of a node's body that its outputs need."""
    wanted = dict(zip(body.output, node.output, strict=False))
    names = {inside: outside for inside, outside in wanted.items() if outside}
    needed, kept = {*names}, list[Any]()
    for operator in reversed(body.node):
        if needed.intersection(operator.output):
            needed.update(names_read(operator))
            kept.append(operator)
    inputs = dict(zip(body.input, [*node.input, *[""] * len(body.input)], strict=False))
    passed = [
        onnx.helper.make_node("Identity", [inputs[inside]], [outside])
        for inside, outside in names.items()
        if inside in inputs
    ]
    made = {inside: outside for inside, outside in names.items() if inside not in inputs}
    nodes = type(body)(node=reversed(kept))
    prefix = f"{next(name for name in node.output if name)}/"
    operators = [*Inside(nodes, prefix, inputs | made).nodes, *passed]
    for operator in operators:  # messages name the operator that the model has
        operator.name = f"in {node.op_type} {node.name or prefix[:-1]}"
    return operators
