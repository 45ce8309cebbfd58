#!/usr/bin/env bash
# apache-tvm 0.27.0.post1: Relax types a batch normalisation of float16 as float16, and LegalizeOps
# makes a function that returns float32 of it: the type of a function's answer changes in a pass.
set -euo pipefail
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
python3 -m venv "$folder/venv"
"$folder/venv/bin/pip" --quiet install apache-tvm==0.27.0.post1 apache-tvm-ffi==0.1.14.post1 numpy
cat >"$folder/show.py" <<'PYTHON'
import sys
import tvm
from tvm import relax

builder = relax.BlockBuilder()
x = relax.Var("x", relax.TensorType((1, 2, 4, 4), "float16"))
names = ("gamma", "beta", "mean", "variance")
vectors = [relax.Var(name, relax.TensorType((2,), "float16")) for name in names]
with builder.function("main", [x, *vectors]):
    with builder.dataflow():
        normalised = builder.emit(relax.op.nn.batch_norm(x, *vectors, axis=1, training=False))
        answer = builder.emit_output(builder.emit(normalised[0]))
    builder.emit_func_output(answer)
module = builder.get()
legal = relax.transform.LegalizeOps()(module)
types = [str(one["main"].ret_ty.dtype) for one in (module, legal)]
print("tvm", tvm.__version__)
print("type of the answer, as it is written:", types[0])
print("type of the answer, after LegalizeOps:", types[1])
sys.exit(0 if types == ["float16", "float32"] else "the behaviour has changed")
PYTHON
"$folder/venv/bin/python" "$folder/show.py"
