#!/usr/bin/env bash
# onnx 1.23.2: ReferenceEvaluator ignores sequence_lens of LSTM, GRU and RNN: a row that ends earlier
# goes on to the end of the longest, without a word. onnxruntime 1.32.0 gives 0 behind its end, and
# the last state is that at its end, as the operator's text has it.
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
random, changed = np.random.default_rng(0), False
for kind, gates in {"LSTM": 4, "GRU": 3, "RNN": 1}.items():
    feeds = {
        "x": random.normal(size=(3, 2, 4)).astype(np.float32),
        "w": random.normal(size=(1, gates * 5, 4)).astype(np.float32),
        "r": random.normal(size=(1, gates * 5, 5)).astype(np.float32),
        "lengths": np.array([3, 1], np.int32),
    }
    node = h.make_node(kind, ["x", "w", "r", "", "lengths"], ["y", "last"], hidden_size=5)
    kinds = {name: h.np_dtype_to_tensor_dtype(value.dtype) for name, value in feeds.items()}
    given = [h.make_tensor_value_info(name, kinds[name], value.shape) for name, value in feeds.items()]
    made = [h.make_tensor_value_info(name, T.FLOAT, None) for name in ("y", "last")]
    model = h.make_model(
        h.make_graph([node], "g", given, made), opset_imports=[h.make_opsetid("", 17)], ir_version=8
    )
    options = {"providers": ["CPUExecutionProvider"]}
    session = onnxruntime.InferenceSession(model.SerializeToString(), **options)
    ends = []
    for answers in (ReferenceEvaluator(model).run(None, feeds), session.run(None, feeds)):
        y, last = answers
        ends.append((float(np.abs(y[1:, 0, 1]).max()), float(np.abs(last[0, 1] - y[0, 0, 1]).max())))
    reference, runtime = ends
    print(f"{kind}, a row of 1 step: largest value behind its end, last state less that at its end")
    print(f"  reference {reference[0]:.3f} {reference[1]:.3f}   onnxruntime {runtime[0]:.3f} {runtime[1]:.3f}")
    changed = changed or min(reference) == 0 or max(runtime) > 1e-6
sys.exit("the behaviour has changed" if changed else 0)
PYTHON
"$folder/venv/bin/python" "$folder/show.py"
