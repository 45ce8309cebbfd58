#!/usr/bin/env bash
# quantize_static of onnxruntime 1.32.0 copies a bias that two nodes share under its name with a
# number behind it, and looks at the names of weights alone: of "val_1" it makes "val_10", which may
# be another node's output (torch.onnx names tensors so). The readers of that output then read the
# bias: nothing is said, the answer is of other values where the shapes fit, else the file is refused.
set -euo pipefail
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
python3 -m venv "$folder/venv"
"$folder/venv/bin/pip" --quiet install onnx==1.23.2 onnxruntime==1.32.0 numpy sympy
cat >"$folder/show.py" <<'PYTHON'
import logging
import os
import sys
import numpy as np
import onnx
import onnxruntime
from onnx import TensorProto, helper, numpy_helper
from onnxruntime.quantization import CalibrationDataReader, QuantFormat, quantize_static

logging.disable()
os.chdir(sys.argv[1])


def written(product):
    """Two products with one bias and a gate, whose output has the name `product`; its error."""
    weights = np.eye(4, dtype=np.float32), np.eye(4, dtype=np.float32), np.ones(4, np.float32)
    nodes = [
        helper.make_node("Gemm", ["x", "w0", "val_1"], ["a"], name="first"),
        helper.make_node("Gemm", ["a", "w1", "val_1"], ["b"], name="second"),
        helper.make_node("Sigmoid", ["b"], [product], name="gate"),
        helper.make_node("Mul", ["b", product], ["y"], name="last"),
    ]
    tensors = [
        numpy_helper.from_array(array, name)
        for array, name in zip(weights, ("w0", "w1", "val_1"), strict=True)
    ]
    values = [helper.make_tensor_value_info(name, TensorProto.FLOAT, [4, 4]) for name in "xy"]
    graph = helper.make_graph(nodes, "net", values[:1], values[1:], tensors)
    model = helper.make_model(graph, opset_imports=[helper.make_opsetid("", 17)], ir_version=9)
    onnx.save(model, "real.onnx")
    given = np.random.default_rng(0).uniform(-2, 2, (4, 4)).astype(np.float32)

    class Calibration(CalibrationDataReader):
        def __init__(self):
            self.inputs = iter([{"x": given}])

        def get_next(self):
            return next(self.inputs, None)

    quantize_static("real.onnx", "bytes.onnx", Calibration(), quant_format=QuantFormat.QDQ)
    answers = [
        onnxruntime.InferenceSession(path).run(None, {"x": given})[0]
        for path in ("real.onnx", "bytes.onnx")
    ]
    return float(np.abs(answers[0] - answers[1]).max() / np.abs(answers[0]).max())


errors = [written(name) for name in ("gate_of_b", "val_10")]
print(f"onnxruntime {onnxruntime.__version__}: error of the quantised model {errors[0]:.3f};")
print(f"the same with the output of one node called val_10: {errors[1]:.3f}")
sys.exit(0 if errors[0] < 0.05 < errors[1] else "it has changed")
PYTHON
"$folder/venv/bin/python" "$folder/show.py" "$folder"
