"""Versions of ONNX in a file: the format, the set of operators, and whether that has the operators
which the file uses. Imports onnx."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from typing import Any

import onnx
from onnx import defs

from tuna.errors import BadInput
from tuna_models.names import OWN_DOMAINS, title
from tuna_models.reading.bodies import all_nodes, version_of
from tuna_models.reading.onnx_files import QOPERATORS_DOMAIN
from tuna_models.reading.operator_forms import schema_of
from tuna_models.refusals import DAMAGED

#: Operators that onnxruntime has, and writes, in opsets before the one that defined them.
_EARLIER = frozenset({"LayerNormalization"})
#: Most nodes that a message names.
_NAMED = 6


def refuse_undefined(name: str, model: Any) -> None:
    """Raise BadInput for versions of ONNX that are not defined, and operators that the version has
    not: a later one may mean something else by them."""
    newest = defs.onnx_opset_version()
    if model.ir_version < 1:
        raise BadInput(
            f"{name} does not say its version of ONNX's format.",
            hint=DAMAGED,
        )
    if model.ir_version > onnx.IR_VERSION:
        raise BadInput(
            f"{name} is in version {model.ir_version} of ONNX's format, and"
            f" {onnx.IR_VERSION} is the newest that this `onnx` ({onnx.__version__}) knows.",
            hint="update onnx, or write the file with an older one",
        )
    for scope in (model, *model.functions):
        versions = [each.version for each in scope.opset_import if each.domain in OWN_DOMAINS]
        if len(set(versions)) > 1:
            raise BadInput(
                f"{name} is of the opsets {' and '.join(map(str, versions))} at once.",
                hint=DAMAGED,
            )
        graph = getattr(scope, "graph", scope)
        nodes = [node for node in all_nodes(graph) if node.domain in OWN_DOMAINS]
        version = version_of(scope, "")
        if nodes and not 1 <= version <= newest:
            of = f"is of opset {version}" if versions else "does not say its opset"
            raise BadInput(
                f"{name} {of}, and ONNX defines 1 to {newest}.",
                hint=f"export it with an opset from 1 to {newest}",
            )
        if missing := list(_missing(nodes, version)):
            more = f" and {len(missing) - _NAMED} more" if len(missing) > _NAMED else ""
            raise BadInput(
                f"{name} has operators that are not in its opset {version}:"
                f" {', '.join(missing[:_NAMED])}{more}.",
                hint="export it with the opset that has them",
            )
        foreign = version_of(scope, QOPERATORS_DOMAIN)
        if foreign > 1 and (read := [n for n in all_nodes(graph) if n.domain == QOPERATORS_DOMAIN]):
            raise BadInput(
                f"{name} has the operator {title(read[0])} of version {foreign} of its domain, and"
                " onnxruntime defines version 1.",
                hint="write the file with the version 1 of that domain",
            )


def _missing(nodes: Iterable[Any], version: int) -> Iterator[str]:
    """Yield a phrase for each operator of ONNX's that its opset of this version has not."""
    for node in nodes:
        operator = node.op_type
        if operator in _EARLIER or not defs.has(operator):
            continue  # none of ONNX's own
        schema = schema_of(operator, version)
        if schema is None:
            yield f"{title(node)}, which begins with opset {_first(operator)}"
        elif schema.deprecated:
            yield f"{title(node)}, which ends with opset {schema.since_version - 1}"


def _first(operator: str) -> int:
    """The first opset of an operator."""
    schemas = defs.get_all_schemas_with_history()
    return min(each.since_version for each in schemas if (each.domain, each.name) == ("", operator))
