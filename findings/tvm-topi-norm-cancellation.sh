#!/usr/bin/env bash
# TVM 0.27.0: the group, instance and layer normalisations of topi take E[x^2] - E[x]^2 in fp32 for
# the variance. For pixels of 128 +- 0.05 nothing of it is left: nearly all values of group_norm
# differ from the definition, here by a factor of five (other sizes give NaN).
set -euo pipefail
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
python3 -m venv "$folder/venv"
"$folder/venv/bin/pip" --quiet install apache-tvm==0.27.0.post1 apache-tvm-ffi==0.1.14.post1 numpy
cat >"$folder/show.py" <<'PYTHON'
import sys
import numpy as np
import tvm
from tvm import te, topi

shape = (1, 320, 64, 64)
x, *weights = (te.placeholder(size, name="xgb"[at]) for at, size in enumerate((shape, (320,), (320,))))
y = topi.nn.group_norm(x, *weights, 32, 1, [2, 3], 1e-5)
run = tvm.compile(te.create_prim_func([x, *weights, y]), target="llvm")
values = (128 + np.random.default_rng(0).normal(0, 0.05, shape)).astype(np.float32)
found = tvm.runtime.tensor(np.zeros(shape, np.float32))
run(*map(tvm.runtime.tensor, (values, np.ones(320, np.float32), np.zeros(320, np.float32))), found)
wide = values.astype(np.float64).reshape(1, 32, -1)
right = (wide - wide.mean(-1, keepdims=True)) / np.sqrt(wide.var(-1, keepdims=True) + 1e-5)
print("tvm", tvm.__version__, "numpy", np.__version__)
print("float64 ", right.reshape(-1)[:4])
print("topi    ", found.numpy().reshape(-1)[:4])
wrong = ~(np.abs(found.numpy().reshape(right.shape) - right) < 1e-2)
print("values more than 0.01 off:", int(wrong.sum()), "of", wrong.size)
sys.exit("the behaviour has changed" if wrong.mean() < 0.5 else 0)
PYTHON
"$folder/venv/bin/python" "$folder/show.py"
