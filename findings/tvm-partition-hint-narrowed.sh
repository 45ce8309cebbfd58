#!/usr/bin/env bash
# TVM 0.27.0: a loop's annotation pragma_loop_partition_hint does nothing where the loop counts in
# int64, as in all functions of a Relax model: NarrowDataType gives the loop a variable of int32, and
# leaves the hint's attribute at the old one, for which LoopPartition then looks in vain. Its test
# in the loop's body remains. Of a loop that counts in int32 the hint is kept.
set -euo pipefail
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
python3 -m venv "$folder/venv"
"$folder/venv/bin/pip" --quiet install apache-tvm==0.27.0.post1 apache-tvm-ffi==0.1.14.post1 numpy
cat >"$folder/show.py" <<'PYTHON'
import sys
import tvm
from tvm import tirx
from tvm.s_tir import transform
from tvm.script import tirx as T


@T.prim_func(s_tir=True)
def narrow(A: T.Buffer((64, 64), "float32"), B: T.Buffer((64, 64), "float32")):
    for i in range(64):
        for j in T.serial(64, annotations={"pragma_loop_partition_hint": True}):
            if j < i + 1:
                B[i, j] = A[i, j] + 1.0


@T.prim_func(s_tir=True)
def wide(A: T.Buffer((64, 64), "float32"), B: T.Buffer((64, 64), "float32")):
    for i in range(T.int64(64)):
        for j in T.serial(T.int64(64), annotations={"pragma_loop_partition_hint": True}):
            if j < i + T.int64(1):
                B[i, j] = A[i, j] + 1.0


print("tvm", tvm.__version__)
seen = []
for name, function in (("int32", narrow), ("int64", wide)):
    module = tvm.IRModule({"main": function})
    for step in (
        transform.LowerOpaqueBlock(),
        tirx.transform.FlattenBuffer(),
        tirx.transform.NarrowDataType(32),
        transform.LoopPartition(),
    ):
        module = step(module)
    writes = module.script().count("B_1[")
    print(f"{name}: {writes} loops write B after LoopPartition")
    seen.append(writes)
sys.exit("the behaviour has changed" if seen != [2, 1] else 0)
PYTHON
"$folder/venv/bin/python" "$folder/show.py"
