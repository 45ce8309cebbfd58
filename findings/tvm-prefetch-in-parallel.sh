#!/usr/bin/env bash
# apache-tvm 0.27.0.post1: the intrinsic prefetch in a T.parallel loop has LLVM store the sums of a reduction at
# each step, which a serial loop keeps in registers: pointers that come from the closure of a
# parallel loop are not noalias, and LLVM's prefetch may read what they point to.
set -euo pipefail
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
python3 -m venv "$folder/venv"
"$folder/venv/bin/pip" --quiet install apache-tvm==0.27.0.post1 apache-tvm-ffi==0.1.14.post1 numpy
cat >"$folder/show.py" <<'PYTHON'
import re
import sys
import tvm
from tvm.script import tirx as T

target = tvm.target.Target({"kind": "llvm", "mcpu": "skylake-avx512", "num-cores": 2})
TEXT = """
@T.prim_func(s_tir=True)
def main(A: T.Buffer((2, 512, 8), "float32"), B: T.Buffer((1024, 16), "float32"), C: T.Buffer((2, 8, 16), "float32")):
    T.func_attr({"global_symbol": "main", "tirx.noalias": True})
    for p in T.LOOP(2):
        with T.sblock("sums"):
            acc = T.sblock_alloc_buffer((8, 16), "float32", scope="local")
            for m in T.unroll(8):
                acc[m, T.ramp(0, 1, 16)] = T.broadcast(T.float32(0), 16)
            for k in T.serial(512):
                ASK
                for m in T.unroll(8):
                    acc[m, T.ramp(0, 1, 16)] = acc[m, T.ramp(0, 1, 16)] + T.broadcast(A[p, k, m], 16) * B[k, T.ramp(0, 1, 16)]
            for m in T.unroll(8):
                C[p, m, T.ramp(0, 1, 16)] = acc[m, T.ramp(0, 1, 16)]
"""
ASK = 'T.evaluate(T.call_intrin("void", "tirx.prefetch", T.address_of(B[k + 64, 0]), 0, 2, 1))'
LOOP = re.compile(r"\n(\.LBB\S+):[^\n]*((?:\n(?!\.LBB)[^\n]*)*?\n\tj\w+\t\1)\b")


def stores(loop, ask):
    """Vectors stored in the loop with the multiply-adds."""
    text = TEXT.replace("LOOP", loop).replace("ASK", ask)
    module = tvm.IRModule({"main": tvm.script.from_source(text)})
    assembly = tvm.tirx.build(module, target=target).inspect_source("asm")
    inner = "".join(body for _, body in LOOP.findall(assembly) if body.count("vfmadd") >= 8)
    assert inner
    return len(re.findall(r"\tvmov\w+\t%zmm\d+, [^%\n]*\(", inner)), inner.count("prefetch")


print("tvm", tvm.__version__)
found = {}
for loop in ("serial", "parallel"):
    for ask in ("pass", ASK):
        found[loop, ask != "pass"], asked = stores(loop, ask)
        print(f"T.{loop}, {asked} prefetches in the loop: {found[loop, ask != 'pass']} vectors stored")
kept = not any(found[key] for key in found if key != ("parallel", True))
sys.exit(0 if kept and found["parallel", True] >= 8 else "the behaviour has changed")
PYTHON
"$folder/venv/bin/python" "$folder/show.py"
