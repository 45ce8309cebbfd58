#!/usr/bin/env bash
# apache-tvm 0.27.0.post1: `compute_at` of a reduction's part (`rfactor` of a split that does not
# divide) drops the condition that the split added (`T.where`), without an error: sums then go on
# into the next row, where the same schedule without `compute_at` is right.
set -euo pipefail
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
python3 -m venv "$folder/venv"
"$folder/venv/bin/pip" --quiet install apache-tvm==0.27.0.post1 apache-tvm-ffi==0.1.14.post1 numpy
cat >"$folder/show.py" <<'PYTHON'
import sys
import numpy as np
import tvm
from tvm import te
from tvm.s_tir import Schedule

x = te.placeholder((5, 50), name="X")  # a row more than is read
k = te.reduce_axis((0, 50), "k")
sums = te.compute((4,), lambda i: te.sum(x[i, k], axis=k), name="S")
y = te.compute((4,), lambda i: sums[i] * 2.0, name="Y")

def answers(placed):
    sch = Schedule(te.create_prim_func([x, y]))
    block = sch.get_sblock("S")
    part = sch.rfactor(sch.split(sch.get_loops(block)[-1], [None, 16])[1], -1)
    if placed:
        row = sch.get_loops(sch.get_sblock("Y"))[0]
        sch.compute_at(block, row)
        sch.compute_at(part, row)
    found = tvm.runtime.tensor(np.zeros(4, np.float32))
    built = tvm.tirx.build(sch.mod, target="llvm")
    built["main"](tvm.runtime.tensor(np.ones((5, 50), np.float32)), found)
    return "T.where" in sch.mod["main"].script(), found.numpy().tolist()

print("tvm", tvm.__version__)
whole, placed = answers(False), answers(True)
print("twice the sum of 50 ones, split by 16, rfactor: condition", *whole)
print("the same, and compute_at:                       condition", *placed)
right = (whole, placed) == ((True, [100.0] * 4), (False, [128.0] * 4))
sys.exit(0 if right else "the behaviour has changed")
PYTHON
"$folder/venv/bin/python" "$folder/show.py"
