"""Reads model files into Relax. Imports TVM, and the package `onnx` or PyTorch."""

from __future__ import annotations

import contextlib
import io
import math
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import onnx
import tvm
from onnx import external_data_helper as external
from onnx import numpy_helper
from onnx.external_data_helper import ExternalDataInfo, load_external_data_for_tensor

from tuna.errors import BadInput
from tuna_models.arguments import TYPES, chosen_extents, refuse_obstacles
from tuna_models.compiler import segments
from tuna_models.names import NAME_CHARS, OWN_DOMAINS, quoted
from tuna_models.reading import (
    costs,
    file_kinds,
    functions,
    inference,
    obstacles,
    opsets,
    qoperators,
    torch_importer,
    wellformed,
)
from tuna_models.reading.bodies import WITH_BODIES, all_nodes, subgraphs, version_of
from tuna_models.reading.converters import Importer, NotConverted
from tuna_models.reading.fold import Folded, fold, known_inputs
from tuna_models.reading.known import Value
from tuna_models.reading.torch_importer import TorchModel
from tuna_models.refusals import CHANGE_HINT, DAMAGED, Refusal, Unsupported, refusals_of, tvm_reason


def read(
    path: Path,
    shapes: Mapping[str, Sequence[int]],
    batch: int | None = None,
    values: Mapping[str, Sequence[float]] | None = None,
) -> Any:
    """Read an ONNX model, or a program of `torch.export`, with inputs of these shapes; `batch` is
    the first extent of the others.

    A shape may also be one value for the name of an open extent, which then holds for all inputs.
    Inputs with `values`, in the order of memory, become constants, of ONNX alone.
    Raises BadInput for a file that is not a valid model, an unknown input, and in one message for
    all extents that stay open and all operators that cannot be imported.
    """
    name, values = path.name, values or {}
    if is_torch(path):
        if values:
            raise BadInput(
                f"{name} is a program of torch.export, whose inputs cannot be given values.",
                hint="export it with the value: torch.export.export(model, inputs)",
            )
        return torch_importer.read(path, shapes, batch)
    model = _graph(path)
    with refusals_of(name):
        wellformed.check_texts(model)
        opsets.refuse_undefined(name, model)
        wellformed.check(model)
        _forget_inferred(model.graph)
        model = functions.in_order(model)
        _check_types(name, real_inputs(model))
        sizes = fix_shapes(name, model, shapes, batch)
        _fix_values(name, model, values)
        costs.check(model)
        _load_weights(model, path.parent)
        model = qoperators.written_out(functions.inlined(model))
        open_sizes = {value.name: sizes[value.name] for value in real_inputs(model)}
        # branches are decided when all shapes are known
        operators = functions.unsupported(
            node
            for node in model.graph.node
            if not functions.is_function(node, version_of(model, node.domain))
            and node.op_type not in WITH_BODIES
        )
        refuse_obstacles(name, operators, open_sizes)
    return model


def is_torch(path: Path) -> bool:
    """Whether the file is a zip archive, as a program of `torch.export` is."""
    with path.open("rb") as file:
        return file.read(len(file_kinds.ZIP)) == file_kinds.ZIP


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


def locations(path: Path) -> list[str]:
    """Return the places of the model's weights, relative to its folder: unchecked text."""
    if is_torch(path):
        return []
    return list(
        dict.fromkeys(ExternalDataInfo(tensor).location for tensor in _outside(_graph(path)))
    )


def _graph(path: Path) -> Any:
    """The model without weights that lie in other files."""
    try:
        model = onnx.load(str(path), load_external_data=False)
    except OSError as error:
        hint = "check that the file is there, and whose it is"
        raise BadInput(f"{path.name} cannot be read: {error.strerror}.", hint=hint) from None
    except Exception:  # protobuf's own, of several kinds
        model = None
    if model is not None and model.graph.node and model.opset_import:
        return model
    if model is not None and model.ir_version and model.graph.output:
        lacks = "operators" if model.opset_import else "the version of its operators"
        raise BadInput(f"{path.name} is an ONNX model that lacks {lacks}.", hint=DAMAGED)
    with path.open("rb") as file:  # protobuf reads much that is something else
        raise file_kinds.refusal(path.name, file)


def _forget_inferred(graph: Any) -> None:
    """Remove shapes and types of values, which tools leave as they were before a change."""
    del graph.value_info[:]
    for node in graph.node:
        for inner in subgraphs(node):
            _forget_inferred(inner)


def _outside(model: Any) -> list[Any]:
    """The tensors whose values lie in other files."""
    return [
        tensor for tensor in external._get_all_tensors(model) if external.uses_external_data(tensor)
    ]


def _load_weights(model: Any, folder: Path) -> None:
    """Read the weights in other files below the model's folder; raises Refusal, also for a place
    past a file's end."""
    for tensor in _outside(model):
        weight = f"the weight {quoted(tensor.name)}"
        try:
            place = ExternalDataInfo(tensor)
            needed = Value.of_tensor(tensor).size_bytes
            if place.length is None:  # else the rest of the file would be read
                tensor.external_data.add(key="length", value=str(needed))
            first, count = place.offset or 0, needed if place.length is None else place.length
            size = (folder / place.location).stat().st_size
        except ValueError:
            raise Refusal(f"{weight} has an offset or length that is no number", DAMAGED) from None
        except OSError as error:
            why = f"{weight} cannot be read from {quoted(place.location)}: {error.strerror}"
            raise Refusal(why, "put the file of weights beside the model") from None
        if first < 0 or count < 0 or first + count > size:
            raise Refusal(
                f"{weight} has {count} bytes from byte {first} on, and {quoted(place.location)} has"
                f" {size}",
                "copy the file of weights again, which is cut off or of another model",
            )
        load_external_data_for_tensor(tensor, str(folder))
        if fault := wellformed.tensor_fault(tensor):
            raise Refusal(f"{weight} {fault}", DAMAGED)


def real_inputs(model: Any) -> list[Any]:
    """The inputs of the graph that are not weights."""
    weights = {tensor.name for tensor in model.graph.initializer}
    return [value for value in model.graph.input if value.name not in weights]


def to_relax(model: Any, name: str) -> tvm.IRModule:
    """Convert a model to Relax; raises BadInput with every operator that cannot be imported.

    The last results of a quantised one are its quantised tensors (`segments.py`).
    """
    if isinstance(model, TorchModel):
        return model.to_relax(name)

    with refusals_of(name):
        folded = fold(functions.in_order(functions.inlined(model)))
        ready = folded.model
        for node in ready.graph.node:
            node.name = node.name or next(filter(None, node.output), "")
        nodes = list(all_nodes(ready.graph))
        written = [node for node in nodes if node.op_type not in WITH_BODIES]
        refuse_obstacles(name, functions.unsupported(written), {})
        obstacles.refuse_types(name, folded)
        obstacles.refuse_undecided(name, ready)
        refuse_obstacles(name, functions.unsupported(nodes), {})
        whole = segments.returning(ready)
        shapes = {value["name"]: value["shape"] for value in inputs_of(ready)}
        reader = Importer(shapes)
        try:
            with contextlib.redirect_stdout(io.StringIO()):  # TVM's importer prints its errors
                module = reader.from_onnx(whole.graph, int(opset(whole)))
        except NotConverted as error:
            raise _refusal(error, folded) from error
        return reader.facts.on(segments.marked(module, ready))


def _refusal(failure: NotConverted, folded: Folded) -> Refusal:
    """The refusal of a node that could not be converted."""
    name = (failure.operator, failure.node)
    node = next(each for each in folded.model.graph.node if (each.op_type, each.name) == name)
    if isinstance(failure.reason, Unsupported):
        return Refusal.of(node, str(failure.reason), CHANGE_HINT)
    said = tvm_reason(failure.reason)
    why = f"TVM's importer does not take it so: {said}" if said else "TVM's importer fails at it"
    inputs = inference.described(node, known_inputs(node, folded.values))
    return Refusal.of(node, f"{why}; {inputs}", CHANGE_HINT)


def opset(model: Any) -> str:
    """The version of ONNX's own operators, or of PyTorch."""
    if isinstance(model, TorchModel):
        return model.version
    return str(
        next((entry.version for entry in model.opset_import if entry.domain in OWN_DOMAINS), 0)
    )


def _check_types(name: str, inputs: list[Any]) -> None:
    for value in inputs:
        kind = obstacles.type_name(value.type)
        if kind not in TYPES:
            known = f"it can be {', '.join(TYPES)}"
            if not kind:
                raise Refusal(f"its input {quoted(value.name)} has no type", known)
            raise BadInput(f"{name} has an input {value.name} of type {kind}.", hint=known)
        if not value.type.tensor_type.HasField("shape"):
            why = f"its input {quoted(value.name)} has no shape, not even a number of axes"
            raise Refusal(why, "export the model with the shapes of its inputs")


def _fix_values(name: str, model: Any, values: Mapping[str, Sequence[float]]) -> None:
    """Make constants of inputs that have values; raises BadInput for others than they can have."""
    inputs = {value.name: value for value in real_inputs(model)}
    if unknown := sorted(values.keys() - inputs.keys()):
        raise BadInput(
            f"{name} has no input {', '.join(unknown)}.", hint=f"inputs: {', '.join(inputs)}"
        )
    for label, numbers in values.items():
        tensor = inputs[label].type.tensor_type
        shape = [extent.dim_value for extent in tensor.shape.dim if not extent.dim_param]
        kind = onnx.helper.tensor_dtype_to_np_dtype(tensor.elem_type)
        if len(tensor.shape.dim) == 1 and not shape:  # an open extent
            shape = [len(numbers)]
        if len(shape) < len(tensor.shape.dim) or math.prod(shape) != len(numbers):
            extents = ",".join(
                extent.dim_param or str(extent.dim_value) for extent in tensor.shape.dim
            )
            raise BadInput(
                f"The input {label} of {name} has the shape ({extents}), not"
                f" {len(numbers)} values.",
                hint="give one for each place, in the order of memory",
            )
        array = np.array(numbers, kind).reshape(shape)
        if kind.kind != "f" and not np.array_equal(array.reshape(-1), numbers):
            raise BadInput(
                f"The input {label} of {name} has whole numbers of type {kind}.",
                hint="give numbers that this type has",
            )
        model.graph.initializer.append(numpy_helper.from_array(array, label))
        model.graph.input.remove(inputs[label])


def fix_shapes(
    name: str, model: Any, shapes: Mapping[str, Sequence[int]], batch: int | None
) -> dict[str, list[int | str]]:
    """Give the open extents of all inputs their values; return the shapes.

    These have a name or ? for each extent that stays open.
    """
    dims = {value.name: value.type.tensor_type.shape.dim for value in real_inputs(model)}
    given = {one: [_extent(extent) for extent in of] for one, of in dims.items()}
    sizes, chosen = chosen_extents(name, given, shapes, batch, fixed=False)
    for one, extents in dims.items():
        for extent, value in zip(extents, chosen[one], strict=True):
            if isinstance(value, int):
                extent.dim_value = value
    for output in model.graph.output:
        for extent in output.type.tensor_type.shape.dim:
            if extent.dim_param in sizes:
                extent.dim_value = sizes[extent.dim_param]
    return chosen


def _extent(dimension: Any) -> int | str:
    """An extent, its name, or ? for one without either; exporters write a negative one for that."""
    if dimension.HasField("dim_value") and dimension.dim_value >= 0:
        return int(dimension.dim_value)
    named = len(dimension.dim_param) <= NAME_CHARS  # a longer one is no help to a person
    return dimension.dim_param if dimension.dim_param and named else "?"
