#!/usr/bin/env bash
# Resize with align_corners by a scale that gives no whole size: onnx 1.23.2 and onnxruntime 1.32.0
# differ. The data of ONNX's node test test_resize_downsample_scales_linear_align_corners divides by
# the scaled length less one, which is no whole number, so its last value is not the input's corner;
# onnxruntime takes the size after rounding down, and its last value is the corner.
set -euo pipefail
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
python3 -m venv "$folder/venv"
"$folder/venv/bin/pip" --quiet install onnx==1.23.2 onnxruntime==1.32.0 numpy pillow
cat >"$folder/show.py" <<'PYTHON'
import sys
import warnings
import numpy as np
import onnx
import onnxruntime
from onnx.backend.test.case.node import collect_testcases

warnings.simplefilter("ignore")
name = "test_resize_downsample_scales_linear_align_corners"
case = next(case for case in collect_testcases("Resize") if case.name == name)
((given, (right,)),) = case.data_sets
session = onnxruntime.InferenceSession(case.model.SerializeToString())
feeds = dict(zip((value.name for value in session.get_inputs()), given))
found = session.run(None, feeds)[0]
print("onnx", onnx.__version__, "onnxruntime", onnxruntime.__version__)
print("input", given[0].reshape(given[0].shape[-2:]).tolist(), "scales", given[-1].tolist())
print("onnx's data ", np.round(right.reshape(-1), 4).tolist())
print("onnxruntime ", np.round(found.reshape(-1), 4).tolist())
sys.exit(0 if right.shape == found.shape and not np.allclose(right, found) else "it has changed")
PYTHON
"$folder/venv/bin/python" "$folder/show.py"
