"""Writes out functions: those of a model, and ONNX's operators that are functions of others.

ONNX defines many operators by a body of simpler ones. Those that TVM's importer lacks or gets wrong
are replaced by this body, with the node's attributes and their defaults in it.
"""

from __future__ import annotations

import functools
import graphlib
import heapq
from collections.abc import Iterable, Sequence
from typing import Any

import onnx
from onnx import inliner

from tuna.common.messages import one_line
from tuna_models.names import OWN_DOMAINS, names_of, operator_name, title
from tuna_models.operators import own_functions
from tuna_models.operators.conversion import converters_of_tvm
from tuna_models.reading import wellformed
from tuna_models.reading.bodies import (
    WITH_BODIES,
    Inside,
    all_nodes,
    names_read,
    version_of,
)
from tuna_models.reading.converters import OWN
from tuna_models.reading.known import UNKNOWN, Value
from tuna_models.reading.onnx_files import is_own
from tuna_models.reading.operator_forms import schema_of
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
    if (schema := schema_of(node.op_type, opset)) is None:
        return None
    attributes = {
        name: each.default_value.SerializeToString() for name, each in schema.attributes.items()
    }
    return attributes, *([each.name for each in of] for of in (schema.inputs, schema.outputs))


@functools.cache
def known_operators() -> frozenset[str]:
    """Return the names of the operators that can be converted."""
    return frozenset({*converters_of_tvm(), *OWN, "Constant"})


def unsupported(nodes: Iterable[Any]) -> dict[str, list[str]]:
    """The names of the nodes of each operator that the importer does not know."""
    known = known_operators()
    found: dict[str, list[str]] = {}
    for node in nodes:
        if not is_own(node.domain, node.op_type) or node.op_type not in known:
            operator, name = names_of(node)
            why = ", which depends on the input" if node.op_type in WITH_BODIES else ""
            found.setdefault(operator, []).append(name + why)
    return found


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
    before = {
        place: [makers[name] for name in names_read(node) if name in makers]
        for place, node in enumerate(nodes)
    }
    sorter, ready, ordered = graphlib.TopologicalSorter(before), list[int](), list[int]()
    try:
        sorter.prepare()
    except graphlib.CycleError as error:
        names = ", ".join(title(nodes[place]) for place in sorted({*error.args[1]})[:5])
        raise Refusal(f"operators wait for each other's values: {names}", CHANGE_HINT) from None
    while sorter.is_active():
        for place in sorter.get_ready():
            heapq.heappush(ready, place)
        ordered.append(heapq.heappop(ready))
        sorter.done(ordered[-1])
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
    schema = schema_of(name, opset, node.domain)
    return schema is not None and (schema.has_function or schema.has_context_dependent_function)


def written_out(node: Any, inputs: Sequence[Value | None], opset: int) -> list[Any]:
    """Return the operators by which an operator is defined in this opset, those that its outputs
    need; none if that takes types which are not known."""
    first = (inputs[0] if inputs else None) or UNKNOWN
    schema = schema_of(node.op_type, opset, node.domain)
    if not schema.has_function and any(each is not None and not each.text for each in inputs):
        return []
    given = {  # onnx's inliner wants a type of an absent input, too
        name: onnx.helper.make_value_info(name, (value or UNKNOWN).type)
        for name, value in zip(node.input, inputs, strict=True)
    }
    outputs = [onnx.helper.make_empty_tensor_value_info(name) for name in node.output if name]
    graph = onnx.helper.make_graph([node], "one", list(given.values()), outputs)
    present = {each.name for each in node.attribute}
    for name, each in schema.attributes.items():
        if name not in present and each.default_value.type:  # onnx's inliner leaves defaults out
            graph.node[0].attribute.add().CopyFrom(each.default_value)
            graph.node[0].attribute[-1].name = name
    own = own_functions.bodies(node, len(first.type.tensor_type.shape.dim), opset)
    if node.op_type in _FP32 and first.kind in (0, onnx.TensorProto.FLOAT):
        return []
    opsets = [onnx.helper.make_opsetid(node.domain, opset)]
    single = onnx.helper.make_model(graph, opset_imports=opsets, functions=own)
    called = [(node.domain, node.op_type)]
    body = inliner.inline_selected_functions(single, called, inline_schema_functions=not own).graph
    if any((each.domain, each.op_type) == called[0] for each in body.node):
        return []
    needed, kept = {*node.output} - {""}, list[Any]()
    for operator in reversed(body.node):
        if needed.intersection(operator.output):
            needed.update(names_read(operator))
            kept.append(operator)
    prefix = f"{next(filter(None, node.output))}/"
    outer = {name: name for name in (*node.input, *node.output) if name}
    operators = Inside(onnx.GraphProto(node=reversed(kept)), prefix, outer).nodes
    for operator in operators:  # messages name the operator that the model has
        operator.name = f"in {node.op_type} {node.name or prefix[:-1]}"
    return operators
