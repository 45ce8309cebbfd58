"""Errors of the layers of an ONNX model in bf16, each alone on the reference's values. Imports
onnx."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import ml_dtypes
import numpy as np
from onnx import numpy_helper

from tuna.libraries.tvm.model_answers import distance
from tuna_models.reading import onnx_reference
from tuna_models.reading.onnx_graph import LAYERS
from tuna_models.reading.torch_importer import TorchModel


def sentence(model: Any, inputs: Mapping[str, Any], allowed: float) -> str:
    """A sentence on the layers that are further off than `allowed` of their largest value, or on
    the one that is the furthest off; empty for a program of PyTorch."""
    found = {} if isinstance(model, TorchModel) else errors(model, inputs)
    if not found:
        return ""
    beyond = [f"{name} ({error:.1e})" for name, error in found.items() if error > allowed]
    if beyond:
        return f"Alone are further off: {', '.join(beyond)}."
    name = max(found, key=lambda layer: found[layer])
    return (
        f"None of its {len(found)} layers alone is: the furthest off is {name} ({found[name]:.1e})."
    )


def errors(model: Any, inputs: Mapping[str, Any]) -> dict[str, float]:
    """The error of each convolution and product with a first and second input of the reference,
    rounded to bfloat16, relative to the largest value of its answer; by name. Products over one
    value are left out, such as phases of positions: they are in fp32 (`bf16_storage.py`)."""
    layers = [node for node in model.graph.node if node.op_type in LAYERS]
    known = {tensor.name: numpy_helper.to_array(tensor) for tensor in model.graph.initializer}
    known |= inputs
    names = dict.fromkeys(name for node in layers for name in (*node.input, *node.output) if name)
    wanted = [name for name in names if name not in known]
    values = {**known, **onnx_reference.evaluate(model, inputs, wanted)[2]}
    found = dict[str, float]()
    for node in layers:
        given: list[Any] = [values[name] if name else None for name in node.input]
        if node.op_type == "MatMul" and given[0].shape[-1] == 1:
            continue
        rounded = [value.astype(ml_dtypes.bfloat16).astype(np.float32) for value in given[:2]]
        answer = onnx_reference.run_node(model, node, [*rounded, *given[2:]])
        title = f"{node.op_type} {node.name or node.output[0]}"
        found[title] = distance(answer, values[node.output[0]])
    return found
