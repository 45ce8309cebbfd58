"""Folds the parts of an ONNX graph that depend on shapes and constants alone.

Exporters write `Shape`, `Slice`, `Concat` and arithmetic before a `Reshape` or `Resize`, of which
TVM's importer needs the result. Branches and loops that they decide are unrolled (`branches`). The
shapes of the inputs are fixed before.
"""

from __future__ import annotations

from typing import Any

import numpy as np
import onnx
from onnx import helper, numpy_helper
from onnx.reference import ReferenceEvaluator

from tuna.models import branches

#: Most values of a computed constant, unless its inputs have as many, as reordered weights do.
_LARGEST = 1 << 12
#: Most rounds; each finds shapes that depend on those of the round before, or an inner branch.
_ROUNDS = 32
_RANDOM = {
    "RandomNormal",
    "RandomUniform",
    "RandomNormalLike",
    "RandomUniformLike",
    "Multinomial",
    "Bernoulli",
}


def fold(model: Any) -> Any:
    """Replace those operators by constants; the model itself where nothing can be computed."""
    constants: dict[str, Any] = {}
    for _ in range(_ROUNDS):
        known, found = _computed(model, constants)
        decided = _has_branches(model)
        if not found and not decided:
            break
        model = _replaced(model, found)
        if not branches.write_out(model.graph, known) and not found:
            break
    return model


def _has_branches(model: Any) -> bool:
    return any(any(branches.subgraphs(node)) for node in model.graph.node)


def _computed(model: Any, read: dict[str, Any]) -> tuple[dict[str, Any], dict[str, Any]]:
    """Return all known values by name, and of them the outputs of operators.

    `read` caches the values of initializers.
    """
    shapes = _shapes(model)
    given = {value.name for value in model.graph.input}
    for tensor in model.graph.initializer:
        if tensor.name not in given and tensor.name not in read:
            read[tensor.name] = numpy_helper.to_array(tensor)
    known, constants = dict(read), set(read)
    for node in model.graph.node:
        if node.op_type == "Shape" and node.input[0] in shapes:
            part = {attribute.name: attribute.i for attribute in node.attribute}
            extents = shapes[node.input[0]][part.get("start") : part.get("end")]
            known[node.output[0]] = np.array(extents, np.int64)
        elif node.op_type == "Constant" or (
            node.op_type not in _RANDOM and _depends_on(node, known)
        ):
            values = _run(model, node, known)
            most = max(_LARGEST, sum(np.size(known[name]) for name in node.input if name))
            if node.op_type == "Constant":
                constants.update(node.output)
            elif any(np.size(value) > most for value in values):
                continue
            known.update(zip(node.output, values, strict=False))
    return known, {name: value for name, value in known.items() if name not in constants}


def _shapes(model: Any) -> dict[str, tuple[int, ...]]:
    """Fully known shapes."""
    inferred = onnx.shape_inference.infer_shapes(_without_weights(model), data_prop=True).graph
    found = {}
    for value in [*inferred.value_info, *inferred.input, *inferred.output]:
        tensor = value.type.tensor_type
        if tensor.HasField("shape"):
            extents = [
                extent.dim_value if extent.HasField("dim_value") else -1
                for extent in tensor.shape.dim
            ]
            if min(extents, default=0) >= 0:
                found[value.name] = tuple(extents)
    found |= {tensor.name: tuple(tensor.dims) for tensor in inferred.initializer}
    return found


def _without_weights(model: Any) -> Any:
    """The model with large constants as inputs, because copying their values takes time."""
    light = type(model)(ir_version=model.ir_version, opset_import=model.opset_import)
    graph, given = model.graph, {value.name for value in model.graph.input}
    light.graph.name = graph.name
    for name in ("node", "input", "output", "value_info"):
        getattr(light.graph, name).extend(getattr(graph, name))
    for tensor in graph.initializer:
        if np.prod(tensor.dims, dtype=np.int64) <= _LARGEST:
            light.graph.initializer.append(tensor)
        elif tensor.name not in given:
            light.graph.input.append(
                helper.make_tensor_value_info(tensor.name, tensor.data_type, tensor.dims)
            )
    return light


def _depends_on(node: Any, known: dict[str, Any]) -> bool:
    has_graph = any(attribute.HasField("g") or attribute.graphs for attribute in node.attribute)
    return not has_graph and bool(node.input) and all(name in known for name in node.input if name)


def _run(model: Any, node: Any, known: dict[str, Any]) -> list[Any]:
    """The outputs of one operator; none where the reference cannot compute it."""
    names = [name for name in dict.fromkeys(node.input) if name]
    inputs = [
        helper.make_tensor_value_info(
            name,
            helper.np_dtype_to_tensor_dtype(np.asarray(known[name]).dtype),
            np.shape(known[name]),
        )
        for name in names
    ]
    outputs = [helper.make_tensor_value_info(name, 0, None) for name in node.output]
    graph = helper.make_graph([node], "one", inputs, outputs)
    single = helper.make_model(graph, opset_imports=model.opset_import, ir_version=model.ir_version)
    try:
        return list(
            ReferenceEvaluator(single).run(None, {name: np.asarray(known[name]) for name in names})
        )
    except Exception:  # its operators raise whatever they do; the operator stays
        return []


def _replaced(model: Any, found: dict[str, Any]) -> Any:
    """Copy the model with constants for fully computed operators, and without inferred shapes."""
    copy = type(model)()
    copy.CopyFrom(model)
    left = [node for node in copy.graph.node if not all(name in found for name in node.output)]
    used = {name for node in left for name in branches.names_read(node)} | {
        value.name for value in copy.graph.output
    }
    del copy.graph.node[:]
    copy.graph.node.extend(left)
    del copy.graph.value_info[:]
    copy.graph.initializer.extend(
        numpy_helper.from_array(np.asarray(value), name)
        for name, value in found.items()
        if name in used
    )
    return copy
