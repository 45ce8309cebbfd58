#!/usr/bin/env bash
# apache-tvm 0.27.0.post1: (x + c) - c of float32 values is simplified to x, as if they were whole
# numbers or reals. With c = 1.5 * 2^23 the sum rounds x to the nearest whole number in NumPy and C;
# compiled by TVM the values come back as they were.
set -euo pipefail
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
python3 -m venv "$folder/venv"
"$folder/venv/bin/pip" --quiet install apache-tvm==0.27.0.post1 apache-tvm-ffi==0.1.14.post1 numpy
cat >"$folder/show.py" <<'PYTHON'
import sys
import numpy as np
import tvm
from tvm import te, tirx

values, c = np.array([0.4, 0.6, 1.5, 2.5], np.float32), 1.5 * 2.0**23


def compiled(expression):
    x = te.placeholder((4,), name="x", dtype="float32")
    y = te.compute((4,), lambda i: expression(x[i]), name="y")
    function = te.create_prim_func([x, y]).with_attr("global_symbol", "main")
    library = tvm.tirx.build(tvm.IRModule({"main": function}), target=tvm.target.Target("llvm"))
    tensors = [tvm.runtime.tensor(array) for array in (values, np.zeros_like(values))]
    library["main"](*tensors)
    return tensors[1].numpy()


constant = tirx.const(c, "float32")
rounded = (values + np.float32(c)) - np.float32(c)
found = compiled(lambda x: (x + constant) - constant)
print("tvm", tvm.__version__, "values", values, "NumPy", rounded, "TVM", found)
same = np.array_equal(rounded, [0, 1, 2, 2]) and np.array_equal(found, values)
sys.exit(0 if same else "the behaviour has changed")
PYTHON
"$folder/venv/bin/python" "$folder/show.py"
