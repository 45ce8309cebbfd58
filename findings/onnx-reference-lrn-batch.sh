#!/usr/bin/env bash
# onnx 1.23.2: the reference evaluator's LRN normalises across the batch's neighbours: its loop over
# channels runs to the number of images. With more channels than images the channels beyond keep
# their value undivided by the sum of squares. onnxruntime 1.32.0 follows the definition.
set -euo pipefail
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
python3 -m venv "$folder/venv"
"$folder/venv/bin/pip" --quiet install onnx==1.23.2 onnxruntime==1.32.0 numpy
cat >"$folder/show.py" <<'PYTHON'
import sys
import numpy as np
import onnx
import onnxruntime
from onnx import TensorProto, helper
from onnx.reference import ReferenceEvaluator

shape = [1, 4, 1, 1]
node = helper.make_node("LRN", ["x"], ["y"], size=1, alpha=1.0, beta=1.0, bias=1.0)
values = [helper.make_tensor_value_info(name, TensorProto.FLOAT, shape) for name in "xy"]
graph = helper.make_graph([node], "lrn", values[:1], values[1:])
model = helper.make_model(graph, opset_imports=[helper.make_opsetid("", 13)], ir_version=8)
x = np.full(shape, 2.0, np.float32)
right = x / (1.0 + x * x)  # size 1: each channel alone
reference = ReferenceEvaluator(model).run(None, {"x": x})[0]
runtime = onnxruntime.InferenceSession(model.SerializeToString()).run(None, {"x": x})[0]
print("onnx", onnx.__version__, "onnxruntime", onnxruntime.__version__)
for name, found in (("definition", right), ("reference", reference), ("onnxruntime", runtime)):
    print(f"{name:12}", found.reshape(-1))
seen = np.allclose(runtime, right) and np.allclose(reference.reshape(-1), [0.4, 2.0, 2.0, 2.0])
sys.exit("the behaviour has changed" if not seen else 0)
PYTHON
"$folder/venv/bin/python" "$folder/show.py"
