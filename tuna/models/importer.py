"""Reads model files into Relax. Imports TVM, and the package `onnx` or PyTorch."""

from __future__ import annotations

import contextlib
import io
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

import onnx
import tvm
from onnx import external_data_helper as external
from onnx.external_data_helper import ExternalDataInfo, load_external_data_for_tensor

from tuna.errors import BadInput
from tuna.models import torch_importer
from tuna.models.arguments import TYPES, chosen_extents, refuse_obstacles
from tuna.models.bodies import all_nodes
from tuna.models.converters import Importer, NotConverted
from tuna.models.fold import OPERATORS, fold
from tuna.models.inlining import inline, known_operators
from tuna.models.onnx_files import OWN_DOMAINS, operator_name
from tuna.models.torch_importer import TorchModel


def read(path: Path, shapes: Mapping[str, Sequence[int]], batch: int | None = None) -> Any:
    """Read an ONNX model or a program of `torch.export` with fixed shapes; see `read_onnx`."""
    if _is_torch(path):
        return torch_importer.read(path, shapes, batch)
    return read_onnx(path, shapes, batch)


def _is_torch(path: Path) -> bool:
    with path.open("rb") as file:
        return file.read(len(torch_importer.MAGIC)) == torch_importer.MAGIC


def inputs_of(model: Any) -> list[dict[str, Any]]:
    """Name, shape and NumPy's name of the type of each input."""
    if isinstance(model, TorchModel):
        return model.inputs()
    return [
        {
            "name": value.name,
            "shape": [extent.dim_value for extent in value.type.tensor_type.shape.dim],
            "dtype": str(onnx.helper.tensor_dtype_to_np_dtype(value.type.tensor_type.elem_type)),
        }
        for value in real_inputs(model)
    ]


def read_onnx(path: Path, shapes: Mapping[str, Sequence[int]], batch: int | None = None) -> Any:
    """Read an ONNX model with inputs of these shapes; `batch` is the first extent of the others.

    A shape may also be one value for the name of an open extent, which then holds for all inputs.
    Raises BadInput for a file that is no valid model, an unknown input, and in one message for all
    extents that stay open and all operators that cannot be imported.
    """
    model = _graph(path)
    _load_weights(model, path)
    _check_types(path.name, real_inputs(model))
    # branches are decided when all shapes are known
    nodes = (node for node in inline(model).graph.node if node.op_type not in OPERATORS)
    refuse_obstacles(path.name, unsupported(nodes), _fix_shapes(path.name, model, shapes, batch))
    return model


def locations(path: Path) -> list[str]:
    """Return the places of the model's weights, relative to its folder: unchecked text."""
    if _is_torch(path):
        return []
    return list(
        dict.fromkeys(ExternalDataInfo(tensor).location for tensor in _outside(_graph(path)))
    )


def _graph(path: Path) -> Any:
    """The model without weights that lie in other files."""
    try:
        model = onnx.load(str(path), load_external_data=False)
    except Exception as error:  # protobuf, onnx and the file system each have their own
        raise BadInput(
            f"{path.name} is no ONNX model: {str(error).splitlines()[0][:300]}"
        ) from None
    if not model.graph.node or not model.opset_import:  # protobuf reads much that is something else
        raise BadInput(f"{path.name} is no ONNX model: it has no operators, or no version of them.")
    return model


def _outside(model: Any) -> list[Any]:
    """The tensors whose values lie in other files."""
    return [
        tensor for tensor in external._get_all_tensors(model) if external.uses_external_data(tensor)
    ]


def _load_weights(model: Any, path: Path) -> None:
    """Read the weights in other files; raises BadInput, also for a place past a file's end."""
    for tensor in _outside(model):
        try:
            wanted = ExternalDataInfo(tensor)
            offset, size = wanted.offset or 0, (path.parent / wanted.location).stat().st_size
            if offset + (wanted.length or 0) > size:
                raise ValueError(
                    f"{wanted.location} has {size} bytes, and it should start at byte {offset}"
                )
            load_external_data_for_tensor(tensor, str(path.parent))
        except Exception as error:  # onnx and the file system each have their own
            why = str(error).splitlines()[0][:300]
            raise BadInput(
                f"{path.name} has a weight {tensor.name!r} that cannot be read: {why}."
            ) from None


def real_inputs(model: Any) -> list[Any]:
    """The inputs of the graph that are not weights."""
    weights = {tensor.name for tensor in model.graph.initializer}
    return [value for value in model.graph.input if value.name not in weights]


def to_relax(model: Any, name: str) -> tvm.IRModule:
    """Convert a model to Relax; raises BadInput with every operator that cannot be imported."""
    if isinstance(model, TorchModel):
        return model.to_relax(name)

    try:
        ready = fold(inline(model))
        for node in ready.graph.node:
            node.name = node.name or node.output[0]
        refuse_obstacles(name, unsupported(all_nodes(ready.graph)), {})
        with contextlib.redirect_stdout(io.StringIO()):  # TVM's importer prints its errors
            return Importer().from_onnx(ready.graph, int(opset(ready)))
    except BadInput:
        raise
    except NotConverted as error:
        where = f"the operator {error.operator} ({error.node})"
        raise BadInput(f"{name} cannot be imported: {where}: {_reason(error)}.") from error
    except Exception as error:  # TVM raises whatever it does
        raise BadInput(f"{name} cannot be imported: {_reason(error)}.") from error


def unsupported(nodes: Iterable[Any]) -> dict[str, list[str]]:
    """The names of the nodes of each operator that the importer does not know."""
    known = known_operators()
    found: dict[str, list[str]] = {}
    for node in nodes:
        if node.domain not in OWN_DOMAINS or node.op_type not in known:
            operator = operator_name(node.domain, node.op_type)
            found.setdefault(operator, []).append(_title(node))
    return found


def opset(model: Any) -> str:
    """The version of ONNX's own operators, or of PyTorch."""
    if isinstance(model, TorchModel):
        return model.version
    return str(
        next((entry.version for entry in model.opset_import if entry.domain in OWN_DOMAINS), 0)
    )


def _title(node: Any) -> str:
    """Return the node's name; for a branch or a loop also why it is not imported."""
    name = str(node.name or (node.output[0] if node.output else node.op_type))
    return f"{name}, which depends on the input" if node.op_type in OPERATORS else name


def _reason(error: BaseException) -> str:
    """The last line of an error, or one sentence for TVM's internal errors."""
    text = str(error).strip()
    if not text or "Check failed" in text or "InternalError" in text:
        return "TVM's importer cannot deal with it"
    return text.splitlines()[-1][:300].rstrip(".")


def _check_types(name: str, inputs: list[Any]) -> None:
    for value in inputs:
        kind = value.type.tensor_type.elem_type
        dtype = (
            str(onnx.helper.tensor_dtype_to_np_dtype(kind))
            if kind
            else str(value.type.WhichOneof("value"))
        )
        if dtype not in TYPES:
            raise BadInput(
                f"{name} has an input {value.name} of type {dtype}.",
                hint=f"it can be {', '.join(TYPES)}",
            )


def _fix_shapes(
    name: str, model: Any, shapes: Mapping[str, Sequence[int]], batch: int | None
) -> dict[str, list[int | str]]:
    """Give the open extents of all inputs their values; return the shapes.

    These have a name or ? for each extent that stays open.
    """
    dims = {value.name: value.type.tensor_type.shape.dim for value in real_inputs(model)}
    given = {
        one: [
            extent.dim_value if extent.dim_value > 0 else extent.dim_param or "?" for extent in of
        ]
        for one, of in dims.items()
    }
    sizes, chosen = chosen_extents(name, given, shapes, batch, fixed=False)
    for one, extents in dims.items():
        for extent, value in zip(extents, chosen[one], strict=True):
            if isinstance(value, int):
                extent.dim_value = value
    for inner in [*model.graph.value_info, *model.graph.output]:
        for extent in inner.type.tensor_type.shape.dim:
            if extent.dim_param in sizes:
                extent.dim_value = sizes[extent.dim_param]
    return chosen
