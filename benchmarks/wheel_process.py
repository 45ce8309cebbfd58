"""What other runtimes make of an ONNX file, for benchmarks/wheels.py; imports nothing of Tuna.

`python -P wheel_process.py answers MODEL.onnx FOLDER` runs the inputs in FOLDER/KIND.npz through
onnxruntime and OpenVINO in fp32 and writes FOLDER/KIND.RUNTIME.npz. `... quantise MODEL.onnx
OUT.onnx FOLDER` writes what onnxruntime's `quantize_static` makes of it (QDQ, U8S8, per channel),
with the shapes of the inputs in FOLDER/*.npz, which are those to calibrate with.
"""

from __future__ import annotations

import sys
import tempfile
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import numpy as np
import onnx


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


def quantise(model: str, output: str, folder: Path) -> None:
    """Write the quantised model."""
    from onnxruntime.quantization import (
        CalibrationDataReader,
        QuantFormat,
        QuantType,
        quant_pre_process,
        quantize_static,
    )

    given = [_read(path) for path in sorted(folder.glob("*.npz"))]

    class Calibration(CalibrationDataReader):  # type: ignore[misc]
        def __init__(self) -> None:
            self._inputs = iter(given)

        def get_next(self) -> Any:
            return next(self._inputs, None)

    whole = onnx.load(model)
    weights = {tensor.name for tensor in whole.graph.initializer}
    for value in whole.graph.input:
        if value.name not in weights:
            value.type.tensor_type.ClearField("shape")
            for extent in given[0][value.name].shape:
                value.type.tensor_type.shape.dim.add().dim_value = extent
    with tempfile.TemporaryDirectory() as temporary:
        fixed, ready = f"{temporary}/fixed.onnx", f"{temporary}/ready.onnx"
        onnx.save(whole, fixed)
        quant_pre_process(fixed, ready, skip_symbolic_shape=True)
        quantize_static(
            *(ready, output, Calibration()),
            quant_format=QuantFormat.QDQ,
            per_channel=True,
            activation_type=QuantType.QUInt8,
            weight_type=QuantType.QInt8,
        )


if __name__ == "__main__":
    if sys.argv[1] == "answers":
        answers(sys.argv[2], Path(sys.argv[3]))
    else:
        quantise(sys.argv[2], sys.argv[3], Path(sys.argv[4]))
