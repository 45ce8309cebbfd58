"""What other runtimes make of an ONNX file, for benchmarks/wheels.py; imports nothing of Tuna.

`python -P wheel_process.py answers MODEL.onnx FOLDER` runs the inputs in FOLDER/KIND.npz through
onnxruntime and OpenVINO in fp32 and writes FOLDER/KIND.RUNTIME.npz. `... fix MODEL.onnx OUT.onnx
FOLDER VALUES` writes the model with the shapes of the inputs in FOLDER/*.npz; those in VALUES, a
JSON object, are constants. `... quantise MODEL.onnx OUT.onnx FOLDER FORM` writes what onnxruntime's
`quantize_static` makes of it, calibrated with these inputs, or its `quantize_dynamic`: FORM is qdq,
qoperator or dynamic, the types of activations and weights, and `channel` or `tensor`.
"""

from __future__ import annotations

import json
import sys
import tempfile
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import numpy as np
import onnx
import onnx.version_converter

#: ONNX's first opset in which a tensor is dequantised with a scale for each channel. onnxruntime's
#: `quantize_static` writes such ones into a model of an older opset too, and then refuses it.
_PER_CHANNEL = 13


def _read(path: Path) -> dict[str, Any]:
    with np.load(path, allow_pickle=False) as arrays:
        return dict(arrays)


def _onnxruntime(model: str) -> Callable[[Mapping[str, Any]], list[Any]]:
    import onnxruntime

    session = onnxruntime.InferenceSession(model, providers=["CPUExecutionProvider"])
    names = {one.name for one in session.get_inputs()}
    return lambda given: list(
        session.run(None, {name: array for name, array in given.items() if name in names})
    )


def _openvino(model: str) -> Callable[[Mapping[str, Any]], list[Any]]:
    import openvino

    compiled = openvino.Core().compile_model(model, "CPU", {"INFERENCE_PRECISION_HINT": "f32"})
    names = {name for port in compiled.inputs for name in port.names}

    def run(given: Mapping[str, Any]) -> list[Any]:
        found = compiled({name: array for name, array in given.items() if name in names})
        return [found[port] for port in compiled.outputs]

    return run


def answers(model: str, folder: Path) -> None:
    """Write the answers of each runtime to each kind of input."""
    kinds = sorted(folder.glob("*.npz"))
    for make in (_onnxruntime, _openvino):
        name = make.__name__.removeprefix("_")
        try:
            run = make(model)
            for path in kinds:
                np.savez(path.with_suffix(f".{name}.npz"), *map(np.asarray, run(_read(path))))
        except Exception as error:  # a runtime that does not take the model has no answers
            print(f"{name}: {str(error).splitlines()[0][:200]}", file=sys.stderr)


def fix(model: str, output: str, folder: Path, values: Mapping[str, Any]) -> None:
    """Write the model with the shapes of the inputs, and with these values as constants."""
    whole, graph_inputs = onnx.load(model), []
    if any(not opset.domain and opset.version < _PER_CHANNEL for opset in whole.opset_import):
        whole = onnx.version_converter.convert_version(whole, _PER_CHANNEL)
    given = _read(min(folder.glob("*.npz")))
    weights = {tensor.name for tensor in whole.graph.initializer}
    for value in whole.graph.input:
        if value.name in values:
            array = given[value.name]
            fixed = np.asarray(values[value.name], array.dtype).reshape(array.shape)
            whole.graph.initializer.append(onnx.numpy_helper.from_array(fixed, value.name))
            continue
        if value.name not in weights:
            value.type.tensor_type.ClearField("shape")
            for extent in given[value.name].shape:
                value.type.tensor_type.shape.dim.add().dim_value = extent
        graph_inputs.append(value)
    del whole.graph.input[:]
    whole.graph.input.extend(graph_inputs)
    onnx.save(whole, output)


def _part_biases(model: Any) -> None:
    """Give each node a bias of its own: for those that nodes share `quantize_static` makes copies
    with a number behind the name, which may be the name of another tensor."""
    tensors = {tensor.name: tensor for tensor in model.graph.initializer}
    seen: set[str] = set()
    for place, node in enumerate(model.graph.node):
        bias = node.input[2] if len(node.input) == 3 else ""
        if bias in seen:
            model.graph.initializer.add().CopyFrom(tensors[bias])
            node.input[2] = model.graph.initializer[-1].name = f"{bias}.of_node_{place}"
        elif bias in tensors:
            seen.add(bias)


def quantise(model: str, output: str, folder: Path, form: str) -> None:
    """Write the quantised model."""
    from onnxruntime.quantization import (
        CalibrationDataReader,
        QuantFormat,
        QuantType,
        quant_pre_process,
        quantize_dynamic,
        quantize_static,
    )

    class Calibration(CalibrationDataReader):  # type: ignore[misc]
        def __init__(self) -> None:
            self._inputs = map(_read, sorted(folder.glob("*.npz")))

        def get_next(self) -> Any:
            return next(self._inputs, None)

    kind, activations, weights, where = form.split()
    types = {"U8": QuantType.QUInt8, "S8": QuantType.QInt8}
    options = {"weight_type": types[weights], "per_channel": where == "channel"}
    with tempfile.TemporaryDirectory() as temporary:
        fixed, ready = f"{temporary}/fixed.onnx", f"{temporary}/ready.onnx"
        fix(model, fixed, folder, {})
        quant_pre_process(fixed, ready, skip_symbolic_shape=True)
        if kind == "dynamic":
            quantize_dynamic(ready, output, **options)
            return
        apart = onnx.load(ready)
        _part_biases(apart)
        onnx.save(apart, ready)
        quantize_static(
            *(ready, output, Calibration()),
            quant_format=QuantFormat.QDQ if kind == "qdq" else QuantFormat.QOperator,
            activation_type=types[activations],
            **options,
        )


if __name__ == "__main__":
    command, model, *words = sys.argv[1:]
    if command == "answers":
        answers(model, Path(words[0]))
    elif command == "fix":
        fix(model, words[0], Path(words[1]), json.loads(words[2]))
    else:
        quantise(model, words[0], Path(words[1]), words[2])
