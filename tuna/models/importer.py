"""Reads a model file into Relax. Imports TVM and, for ONNX, the package `onnx`."""

from __future__ import annotations

import contextlib
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import tvm
from tvm.relax.frontend.onnx import from_onnx, onnx_frontend

from tuna.errors import BadInput

#: Operators that TVM's importer handles without an entry in its table.
_DIRECT = {"Constant", "If"}
_OWN_DOMAINS = ("", "ai.onnx")


def read_onnx(path: Path, shapes: Mapping[str, Sequence[int]], batch: int | None = None) -> Any:
    """The ONNX model with inputs of these shapes, `batch` as the first extent of those that are not named.

    Raises BadInput for a file that is no valid model, an input that it does not have, and an extent that nothing says.
    """
    import onnx

    try:
        model = onnx.load(str(path))
    except Exception as error:  # protobuf, onnx and the file system each have their own
        raise BadInput(f"{path.name} is no ONNX model: {str(error).splitlines()[0][:300]}") from None
    if not model.graph.node or not model.opset_import:  # protobuf reads much that is something else
        raise BadInput(f"{path.name} is no ONNX model: it has no operators, or no version of them.")
    inputs = real_inputs(model)
    unknown = set(shapes) - {value.name for value in inputs}
    if unknown:
        there = ", ".join(value.name for value in inputs)
        raise BadInput(f"{path.name} has no input {', '.join(sorted(unknown))}.", hint=f"inputs: {there}")
    for value in inputs:
        _fix_shape(value, shapes.get(value.name), batch)
    return model


def real_inputs(model: Any) -> list[Any]:
    """The inputs of the graph that are not weights."""
    weights = {tensor.name for tensor in model.graph.initializer}
    return [value for value in model.graph.input if value.name not in weights]


def to_relax(model: Any, name: str) -> tvm.IRModule:
    """The model as a Relax module; raises BadInput that names every operator which cannot be imported."""
    missing = unsupported(model)
    if missing:
        listed = ", ".join(f"{operator} ({count})" for operator, count in sorted(missing.items()))
        raise BadInput(f"{name} has operators that cannot be imported: {listed}.")
    try:
        from tuna.models.fold import fold

        return from_onnx(fold(model), keep_params_in_input=False)
    except Exception as error:  # TVM raises whatever its converters do
        raise BadInput(f"{name} cannot be imported: {str(error).strip().splitlines()[-1][:300]}") from error


def unsupported(model: Any) -> Counter[str]:
    """How often the model, sub-graphs included, uses each operator that the importer does not know."""
    known = {*onnx_frontend._get_convert_map(), *_DIRECT}
    found: Counter[str] = Counter()
    for node in _nodes(model.graph):
        if node.domain not in _OWN_DOMAINS:
            found[f"{node.domain}.{node.op_type}"] += 1
        elif node.op_type not in known:
            found[node.op_type] += 1
    return found


def opset(model: Any) -> str:
    """The version of ONNX's own operators."""
    return str(next((entry.version for entry in model.opset_import if entry.domain in _OWN_DOMAINS), 0))


def _nodes(graph: Any) -> Iterator[Any]:
    for node in graph.node:
        yield node
        for attribute in node.attribute:
            with contextlib.suppress(AttributeError):
                for inner in [attribute.g, *attribute.graphs]:
                    yield from _nodes(inner)


def _fix_shape(value: Any, wanted: Sequence[int] | None, batch: int | None) -> None:
    extents = value.type.tensor_type.shape.dim
    if wanted is not None and len(wanted) != len(extents):
        raise BadInput(f"The input {value.name} has {len(extents)} dimensions, not {len(wanted)}.")
    for position, extent in enumerate(extents):
        if wanted is not None:
            extent.dim_value = wanted[position]
        elif position == 0 and batch is not None:
            extent.dim_value = batch
        elif extent.dim_value < 1:
            example = ",".join(str(other.dim_value or "?") for other in extents)
            raise BadInput(
                f"The input {value.name} has no fixed shape.", hint=f"give it with --shape {value.name}={example}"
            )
