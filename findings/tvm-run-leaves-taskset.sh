#!/usr/bin/env bash
# apache-tvm 0.27.0.post1: the first parallel function that a process runs widens the affinity of the
# calling thread. A process that `taskset` gave one core may use others from then on, and so may
# everything that it starts. With TVM_BIND_THREADS=0 it stays where it was. Needs two cores.
set -euo pipefail
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
python3 -m venv "$folder/venv"
"$folder/venv/bin/pip" --quiet install apache-tvm==0.27.0.post1 apache-tvm-ffi==0.1.14.post1 numpy
cat >"$folder/show.py" <<'PYTHON'
import os
import numpy as np
import tvm
from tvm import te

rows = te.placeholder((64, 256), "float32", name="rows")
more = te.compute((64, 256), lambda i, j: rows[i, j] + 1.0, name="more")
schedule = tvm.s_tir.Schedule(te.create_prim_func([rows, more]))
schedule.parallel(schedule.get_loops(schedule.get_sblock("more"))[0])
library = tvm.compile(schedule.mod, target=tvm.target.Target({"kind": "llvm", "num-cores": 2}))
arrays = [tvm.runtime.tensor(np.zeros((64, 256), "float32")) for _ in range(2)]
before = sorted(os.sched_getaffinity(0))
library["main"](*arrays)
print("widened" if sorted(os.sched_getaffinity(0)) != before else "kept", before, sorted(os.sched_getaffinity(0)))
PYTHON
core=$(python3 -c 'import os; print(max(os.sched_getaffinity(0)))')
run() { env TVM_NUM_THREADS=2 "$@" taskset -c "$core" "$folder/venv/bin/python" "$folder/show.py"; }
"$folder/venv/bin/python" -c 'import tvm; print("tvm", tvm.__version__)'
bound=$(run)
free=$(run TVM_BIND_THREADS=0)
echo "as it comes:        affinity $bound"
echo "TVM_BIND_THREADS=0: affinity $free"
[[ $bound == widened* && $free == kept* ]] || { echo "the behaviour has changed" >&2; exit 1; }
