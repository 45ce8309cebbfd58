"""Computes the parts of an ONNX graph that depend on shapes and constants alone, once the inputs' shapes are fixed.

Exporters write `Shape`, `Slice`, `Concat` and arithmetic before a `Reshape` or `Resize`. TVM's importer wants the result.
"""

from __future__ import annotations

from typing import Any

import numpy as np
import onnx
from onnx import helper, numpy_helper
from onnx.reference import ReferenceEvaluator

#: A constant that is computed has at most this many values; larger ones are weights, and stay an operator.
_LARGEST = 1 << 12
#: Each round finds shapes that depend on those of the one before.
_ROUNDS = 8
_RANDOM = {"RandomNormal", "RandomUniform", "RandomNormalLike", "RandomUniformLike", "Multinomial", "Bernoulli"}


def fold(model: Any) -> Any:
    """The model with those operators replaced by constants; the same model where nothing can be computed."""
    for _ in range(_ROUNDS):
        found = _computed(model)
        if not found:
            break
        model = _replaced(model, found)
    return model


def _computed(model: Any) -> dict[str, Any]:
    """The values of outputs of operators, by name."""
    shapes = _shapes(model)
    known = {
        tensor.name: numpy_helper.to_array(tensor)
        for tensor in model.graph.initializer
        if np.prod(tensor.dims, dtype=np.int64) <= _LARGEST
    }
    given = {value.name for value in model.graph.input}
    known = {name: value for name, value in known.items() if name not in given}
    constants = set(known)
    for node in model.graph.node:
        if node.op_type == "Shape" and not node.attribute and node.input[0] in shapes:
            known[node.output[0]] = np.array(shapes[node.input[0]], np.int64)
        elif node.op_type == "Constant" or (node.op_type not in _RANDOM and _depends_on(node, known)):
            values = _run(model, node, known)
            if all(np.asarray(value).size <= _LARGEST for value in values):
                known.update(zip(node.output, values, strict=True))
            if node.op_type == "Constant":
                constants.update(node.output)
    return {name: value for name, value in known.items() if name not in constants}


def _shapes(model: Any) -> dict[str, tuple[int, ...]]:
    """Shapes that are known in full."""
    inferred = onnx.shape_inference.infer_shapes(model, data_prop=True).graph
    found = {}
    for value in [*inferred.value_info, *inferred.input, *inferred.output]:
        tensor = value.type.tensor_type
        if tensor.HasField("shape"):
            extents = [extent.dim_value if extent.HasField("dim_value") else -1 for extent in tensor.shape.dim]
            if min(extents, default=0) >= 0:
                found[value.name] = tuple(extents)
    found |= {tensor.name: tuple(tensor.dims) for tensor in inferred.initializer}
    return found


def _depends_on(node: Any, known: dict[str, Any]) -> bool:
    has_graph = any(attribute.HasField("g") or attribute.graphs for attribute in node.attribute)
    return not has_graph and bool(node.input) and all(name in known for name in node.input if name)


def _run(model: Any, node: Any, known: dict[str, Any]) -> list[Any]:
    """The outputs of one operator; none for one that the reference does not have."""
    names = [name for name in dict.fromkeys(node.input) if name]
    inputs = [
        helper.make_tensor_value_info(
            name, helper.np_dtype_to_tensor_dtype(np.asarray(known[name]).dtype), np.shape(known[name])
        )
        for name in names
    ]
    outputs = [helper.make_tensor_value_info(name, 0, None) for name in node.output]
    graph = helper.make_graph([node], "one", inputs, outputs)
    single = helper.make_model(graph, opset_imports=model.opset_import, ir_version=model.ir_version)
    try:
        return list(ReferenceEvaluator(single).run(None, {name: np.asarray(known[name]) for name in names}))
    except (NotImplementedError, RuntimeError, ValueError, TypeError):
        return [np.empty(_LARGEST + 1)]


def _replaced(model: Any, found: dict[str, Any]) -> Any:
    """A copy with constants for the operators all of whose outputs were computed; inferred shapes are dropped."""
    copy = type(model)()
    copy.CopyFrom(model)
    left = [node for node in copy.graph.node if not all(name in found for name in node.output)]
    used = {name for node in left for name in node.input} | {value.name for value in copy.graph.output}
    del copy.graph.node[:]
    copy.graph.node.extend(left)
    del copy.graph.value_info[:]
    copy.graph.initializer.extend(
        numpy_helper.from_array(np.asarray(value), name) for name, value in found.items() if name in used
    )
    return copy
