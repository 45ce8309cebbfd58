#!/usr/bin/env bash
# TVM 0.27.0: relax.const makes int32 of a NumPy array of int64, and float32 of float64, unless the
# type is given as well. Its docstring names int32 and float32 for Python's own numbers only, and
# "the same default rule as numpy" for all others.
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

print("tvm", tvm.__version__, "numpy", np.__version__)
seen = []
for kind in ("int64", "float64", "int16", "float16"):
    array = np.array([1, 2], kind)
    plain, named = (str(relax.const(array, *given).ty.dtype) for given in ((), (kind,)))
    print(f"{kind:8} relax.const(array): {plain:8} relax.const(array, {kind!r}): {named}")
    seen.append((plain, named))
expected = [("int32", "int64"), ("float32", "float64"), ("int16", "int16"), ("float16", "float16")]
sys.exit("the behaviour has changed" if seen != expected else 0)
PYTHON
"$folder/venv/bin/python" "$folder/show.py"
