"""Writes out ONNX's functions: those of the model, and ONNX's operators that are defined by others.

A definition is preferred to TVM's converter where that is of another operator of the same name, and
used wherever there is no converter. Imports TVM's importer.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from typing import Any

import onnx
from onnx import defs, helper, inliner
from tvm.relax.frontend.onnx import onnx_frontend

from tuna.models.converters import OWN
from tuna.models.fold import OPERATORS, subgraphs, without_weights
from tuna.models.onnx_files import OWN_DOMAINS, operator_name

#: Operators that are always written out: TVM's converter is that of Microsoft's operator.
_ALWAYS = {"Attention"}
#: Most rounds; each writes out functions in the bodies of those of the round before.
_ROUNDS = 8


def inline(model: Any) -> Any:
    """Return the model without functions of its own, and with the definitions of ONNX's operators
    that have no converter; the model itself where there are none."""
    if model.functions:
        model = inliner.inline_local_functions(model)
    tried: set[str] = set()
    for _ in range(_ROUNDS):
        names = {name for name in _defined(model) if name not in tried}
        if not names:
            break
        tried |= names
        for name in sorted(names):
            written = _written_out(model, name)
            if written is not None:
                model = written
    return model


def _defined(model: Any) -> Iterator[str]:
    """Yield the operators of the model that have no converter, or a wrong one, and a definition."""
    used = {node.op_type for node in all_nodes(model.graph) if node.domain in OWN_DOMAINS}
    for name in {*unsupported(all_nodes(model.graph))} | (used & _ALWAYS):
        if _has_definition(name, _version(model)):
            yield name


def _has_definition(name: str, version: int) -> bool:
    if not defs.has(name, version):
        return False
    schema: Any = defs.get_schema(name, version)  # its stub lacks both
    return bool(schema.has_function or schema.has_context_dependent_function)


def _written_out(model: Any, name: str) -> Any:
    """The model with the definition of an operator in its place, if all operators of that can be
    imported or have a definition; else None."""
    light = without_weights(model)
    _add_defaults(light, name)
    light = onnx.shape_inference.infer_shapes(light, data_prop=True)
    light.graph.value_info.extend(
        helper.make_tensor_value_info(tensor.name, tensor.data_type, tensor.dims)
        for tensor in light.graph.initializer
    )
    # the inliner asks for the types of inputs that are left out, too
    light.graph.value_info.append(helper.make_tensor_value_info("", onnx.TensorProto.FLOAT, None))
    try:
        written = inliner.inline_selected_functions(
            light, [("", name)], inline_schema_functions=True
        )
    except RuntimeError:  # beside a foreign operator, whose type is not known
        return None
    added = {*unsupported(all_nodes(written.graph), branches=False)}
    added -= {*unsupported(all_nodes(model.graph))}
    if not all(_has_definition(operator, _version(model)) for operator in added):
        return None
    for kept in ("input", "initializer"):
        del getattr(written.graph, kept)[:]
        getattr(written.graph, kept).extend(getattr(model.graph, kept))
    del written.graph.value_info[:]
    return written


def _add_defaults(model: Any, name: str) -> None:
    """Write out the defaults of an operator's attributes, which the inliner leaves without values
    where the definition reads them."""
    defaults = [
        attribute.default_value
        for attribute in defs.get_schema(name, _version(model)).attributes.values()
        if attribute.default_value.name
    ]
    for node in all_nodes(model.graph):
        if node.op_type == name and node.domain in OWN_DOMAINS:
            given = {attribute.name for attribute in node.attribute}
            node.attribute.extend(one for one in defaults if one.name not in given)


def _version(model: Any) -> int:
    """The version of ONNX's own operators."""
    return next((entry.version for entry in model.opset_import if entry.domain in OWN_DOMAINS), 1)


def unsupported(nodes: Iterable[Any], *, branches: bool = True) -> dict[str, list[str]]:
    """The names of the nodes of each operator that the importer does not know; without `branches`
    but for those that `fold` may write out."""
    known = {*onnx_frontend._get_convert_map(), *OWN, "Constant"}
    found: dict[str, list[str]] = {}
    for node in nodes:
        if not branches and node.op_type in OPERATORS:
            continue
        if node.domain not in OWN_DOMAINS or node.op_type not in known:
            operator = operator_name(node.domain, node.op_type)
            found.setdefault(operator, []).append(_title(node))
    return found


def all_nodes(graph: Any) -> Iterator[Any]:
    """Yield the operators of a graph, and those of its branches and loops."""
    for node in graph.node:
        yield node
        for inner in subgraphs(node):
            yield from all_nodes(inner)


def _title(node: Any) -> str:
    """Return the node's name; for a branch or a loop also why it is not imported."""
    name = str(node.name or (node.output[0] if node.output else node.op_type))
    return f"{name}, which depends on the input" if node.op_type in OPERATORS else name
