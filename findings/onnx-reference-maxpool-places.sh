#!/usr/bin/env bash
# onnx 1.23.2: ReferenceEvaluator gives MaxPool's second output, the places of the largest values,
# outside of the input where values next to the padding are equal: negative ones for an image of
# zeros. ONNX says that padding is not looked at; onnxruntime 1.32.0 gives the first place inside.
set -euo pipefail
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
python3 -m venv "$folder/venv"
"$folder/venv/bin/pip" --quiet install onnx==1.23.2 onnxruntime==1.32.0
cat >"$folder/show.py" <<'PYTHON'
import sys
import numpy as np
import onnx
import onnxruntime
from onnx import TensorProto as T, helper as h
from onnx.reference import ReferenceEvaluator

print("onnx", onnx.__version__, "onnxruntime", onnxruntime.__version__)
node = h.make_node("MaxPool", ["x"], ["y", "places"], kernel_shape=[5, 5], pads=[2, 2, 2, 2])
graph = h.make_graph(
    [node], "g",
    [h.make_tensor_value_info("x", T.FLOAT, [1, 1, 5, 5])],
    [h.make_tensor_value_info("y", T.FLOAT, None), h.make_tensor_value_info("places", T.INT64, None)],
)
model = h.make_model(graph, opset_imports=[h.make_opsetid("", 17)], ir_version=8)
x = np.zeros((1, 1, 5, 5), np.float32)
options = {"providers": ["CPUExecutionProvider"]}
session = onnxruntime.InferenceSession(model.SerializeToString(), **options)
_, reference = ReferenceEvaluator(model).run(None, {"x": x})
_, runtime = session.run(None, {"x": x})
print("first row of places: reference", reference[0, 0, 0].tolist(), "onnxruntime", runtime[0, 0, 0].tolist())
wrong = bool((reference < 0).any()) and runtime.min() == 0
sys.exit(0 if wrong else "the behaviour has changed")
PYTHON
"$folder/venv/bin/python" "$folder/show.py"
