#!/usr/bin/env bash
# onnxruntime 1.32.0: the answers of DynamicQuantizeLSTM, which `quantize_dynamic` writes for LSTM,
# depend on the number of threads from a batch of two on: each thread rounds the states of its own
# rows to bytes on a scale of their own. 1 and 2 threads differ by some thousandths. With one thread
# all rows share a scale, as by DynamicQuantizeLinear of the whole state. Compare with one thread.
set -euo pipefail
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
python3 -m venv "$folder/venv"
"$folder/venv/bin/pip" --quiet install onnx==1.23.2 onnxruntime==1.32.0
cat >"$folder/show.py" <<'PYTHON'
import sys
import numpy as np
import onnxruntime
from onnx import TensorProto, helper, numpy_helper


def answers(batch, threads):
    random, units = np.random.default_rng(3), 20
    constants = {"ws": np.full(1, 0.003, np.float32), "wz": np.zeros(1, np.int8)}
    for name, rows in (("w", 7), ("r", units)):
        constants[name] = random.integers(-128, 128, (1, rows, 4 * units)).astype(np.int8)
    x = random.normal(0, 1, (5, batch, 7)).astype(np.float32)
    names = ["x", "w", "r", "", "", "", "", "", "ws", "wz", "ws", "wz"]
    node = helper.make_node(
        "DynamicQuantizeLSTM", names, ["y"], domain="com.microsoft", hidden_size=units)
    graph = helper.make_graph(
        [node], "net",
        [helper.make_tensor_value_info("x", TensorProto.FLOAT, x.shape)],
        [helper.make_tensor_value_info("y", TensorProto.FLOAT, None)],
        [numpy_helper.from_array(values, name) for name, values in constants.items()])
    opsets = [helper.make_opsetid("", 17), helper.make_opsetid("com.microsoft", 1)]
    model = helper.make_model(graph, opset_imports=opsets, ir_version=8)
    options = onnxruntime.SessionOptions()
    options.intra_op_num_threads = threads
    session = onnxruntime.InferenceSession(
        model.SerializeToString(), options, providers=["CPUExecutionProvider"])
    return session.run(None, {"x": x})[0]


print("onnxruntime", onnxruntime.__version__)
errors = {batch: float(np.abs(answers(batch, 1) - answers(batch, 2)).max()) for batch in (1, 3)}
for batch, error in errors.items():
    print(f"batch {batch}: 1 and 2 threads differ by {error:.1e}")
sys.exit("the behaviour has changed" if errors[1] > 1e-6 or errors[3] < 1e-4 else 0)
PYTHON
"$folder/venv/bin/python" "$folder/show.py"
