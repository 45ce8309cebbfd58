"""Reads a model file into Relax. Imports TVM, for ONNX the package `onnx`, for programs of `torch.export` PyTorch."""

from __future__ import annotations

import contextlib
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import tvm
from tvm.relax.frontend.onnx import from_onnx, onnx_frontend

from tuna.errors import BadInput
from tuna.models import torch_importer
from tuna.models.torch_importer import TorchModel

#: Operators that TVM's importer handles without an entry in its table.
_DIRECT = {"Constant", "If"}
_OWN_DOMAINS = ("", "ai.onnx")


def read(path: Path, shapes: Mapping[str, Sequence[int]], batch: int | None = None) -> Any:
    """The model in a file, ONNX or a program of `torch.export`, with fixed shapes; see `read_onnx`."""
    with path.open("rb") as file:
        if file.read(len(torch_importer.MAGIC)) == torch_importer.MAGIC:
            return torch_importer.read(path, path.name, shapes, batch)
    return read_onnx(path, shapes, batch)


def inputs_of(model: Any) -> list[dict[str, Any]]:
    """Name, shape and NumPy's name of the type of each input."""
    if isinstance(model, TorchModel):
        return model.inputs()
    import onnx

    return [
        {
            "name": value.name,
            "shape": [extent.dim_value for extent in value.type.tensor_type.shape.dim],
            "dtype": str(onnx.helper.tensor_dtype_to_np_dtype(value.type.tensor_type.elem_type)),
        }
        for value in real_inputs(model)
    ]


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
    shapes = _with_open_extents(inputs, shapes)
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
    if isinstance(model, TorchModel):
        return model.to_relax(name)
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
    """The version of ONNX's own operators, or of PyTorch."""
    if isinstance(model, TorchModel):
        return model.version
    return str(next((entry.version for entry in model.opset_import if entry.domain in _OWN_DOMAINS), 0))


def _nodes(graph: Any) -> Iterator[Any]:
    for node in graph.node:
        yield node
        for attribute in node.attribute:
            with contextlib.suppress(AttributeError):
                for inner in [attribute.g, *attribute.graphs]:
                    yield from _nodes(inner)


def _with_open_extents(inputs: list[Any], shapes: Mapping[str, Sequence[int]]) -> dict[str, Sequence[int]]:
    """The shapes of inputs, without those that are one value for an extent that the model leaves open under that name."""
    left = dict(shapes)
    for value in inputs:
        for extent in value.type.tensor_type.shape.dim:
            if extent.dim_param in shapes and len(shapes[extent.dim_param]) == 1:
                left.pop(extent.dim_param, None)
                extent.dim_value = shapes[extent.dim_param][0]
    return left


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
