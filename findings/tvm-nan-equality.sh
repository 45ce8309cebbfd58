#!/usr/bin/env bash
# apache-tvm 0.27.0.post1: `x == x` on floats is folded to true when the expression is written, so
# the usual test for NaN, `x != x`, is always false in a kernel; `x <= inf` is kept.
set -euo pipefail
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
python3 -m venv "$folder/venv"
"$folder/venv/bin/pip" --quiet install apache-tvm==0.27.0.post1 apache-tvm-ffi==0.1.14.post1 numpy
cat >"$folder/show.py" <<'PYTHON'
import math
import sys
import numpy as np
import tvm
from tvm import te, tirx

def answers(compare):
    x = te.placeholder((3,), "float32", name="x")
    one, zero = tirx.const(1.0, "float32"), tirx.const(0.0, "float32")
    y = te.compute((3,), lambda i: tirx.Select(compare(x[i]), one, zero), name="y")
    built = tvm.tirx.build(te.create_prim_func([x, y]), target="llvm")
    given = tvm.runtime.tensor(np.array([1.0, math.nan, math.inf], np.float32))
    found = tvm.runtime.tensor(np.zeros(3, np.float32))
    built["main"](given, found)
    return found.numpy().tolist()

print("tvm", tvm.__version__)
unequal = answers(lambda value: value != value)
bounded = answers(lambda value: value <= tirx.const(math.inf, "float32"))
print("x != x   of 1, nan, inf:", unequal, "(IEEE 754: 0, 1, 0)")
print("x <= inf of 1, nan, inf:", bounded, "(IEEE 754: 1, 0, 1)")
sys.exit(0 if (unequal, bounded) == ([0, 0, 0], [1, 0, 1]) else "the behaviour has changed")
PYTHON
"$folder/venv/bin/python" "$folder/show.py"
