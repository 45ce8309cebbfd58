#!/usr/bin/env bash
# apache-tvm 0.27.0.post1: argmax of a row that holds nothing but the least value of its type (zeros
# of uint8, -128 of int8, -inf or the least number of fp32) is -1, and argmin of the largest as well:
# the reduction begins with the index -1 and that value, which no other one replaces. A table that is
# read at such an index is read at its last row.
set -euo pipefail
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
python3 -m venv "$folder/venv"
"$folder/venv/bin/pip" --quiet install apache-tvm==0.27.0.post1 apache-tvm-ffi==0.1.14.post1 numpy
cat >"$folder/show.py" <<'PYTHON'
import sys
import numpy as np
import tvm
from tvm import relax

def answer(operator, row):
    x = relax.Var("x", relax.TensorType(row.shape, str(row.dtype)))
    builder = relax.BlockBuilder()
    with builder.function("main", [x]):
        with builder.dataflow():
            found = builder.emit_output(operator(x, 0))
        builder.emit_func_output(found)
    built = tvm.compile(builder.get(), target="llvm")
    run = relax.VirtualMachine(built, tvm.cpu())["main"]
    return int(run(tvm.runtime.tensor(row)).numpy())

print("tvm", tvm.__version__)
rows = {
    "argmax of uint8 zeros": (relax.op.argmax, np.zeros(4, np.uint8)),
    "argmax of int8 -128": (relax.op.argmax, np.full(4, -128, np.int8)),
    "argmax of fp32 -inf": (relax.op.argmax, np.full(4, -np.inf, np.float32)),
    "argmin of int8 127": (relax.op.argmin, np.full(4, 127, np.int8)),
    "argmin of fp32 inf": (relax.op.argmin, np.full(4, np.inf, np.float32)),
}
found = {title: answer(*case) for title, case in rows.items()}
for title, index in found.items():
    print(f"{title}: {index} (NumPy: 0)")
sys.exit(0 if set(found.values()) == {-1} else "the behaviour has changed")
PYTHON
"$folder/venv/bin/python" "$folder/show.py"
