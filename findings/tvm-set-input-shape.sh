#!/usr/bin/env bash
# apache-tvm 0.27.0.post1: `VirtualMachine.set_input` takes a Shape apart. In tvm-ffi 0.1.14 a Shape
# is a Python tuple, of which set_input makes an array of int32 tensors, so that a Relax function
# with a shape as its parameter refuses it. The same Shape is right in a direct call of the function
# in this process, and by set_input where it is a handle of an RPC session.
set -euo pipefail
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
python3 -m venv "$folder/venv"
"$folder/venv/bin/pip" --quiet install apache-tvm==0.27.0.post1 apache-tvm-ffi==0.1.14.post1 numpy \
  cloudpickle psutil
cat >"$folder/show.py" <<'PYTHON'
import sys
import tvm
import tvm_ffi
from tvm import relax, rpc, tirx

n, m = tirx.Var("n", "int64"), tirx.Var("m", "int64")
shape = relax.Var("shape", relax.ShapeType([n, m]))
builder = relax.BlockBuilder()
with builder.function("main", [shape]):
    threes = relax.op.full(relax.ShapeExpr([n, m]), relax.const(3.0), "float32")
    builder.emit_func_output(builder.emit(threes))
module = relax.transform.LegalizeOps()(builder.get())
tvm.compile(module, target=tvm.target.Target("llvm")).export_library("model.so")

print("tvm", tvm.__version__, "Shape is a tuple:", issubclass(tvm_ffi.Shape, tuple))
machine = relax.VirtualMachine(tvm.runtime.load_module("model.so"), tvm.cpu())
given = tvm_ffi.Shape((2, 5))
direct = machine["main"](given).numpy().shape
print("direct call:          ", direct)
try:
    machine.set_input("main", given)
    machine.invoke_stateful("main")
    said = "it is taken"
except Exception as error:
    said = str(error).strip().splitlines()[-1].rpartition(")")[2].strip()
print("set_input:            ", said)
session = rpc.LocalSession()
session.upload("model.so")
there = relax.VirtualMachine(session.load_module("model.so"), session.cpu(0))
there.set_input("main", session.get_function("ffi.Shape")(2, 5))
there.invoke_stateful("main")
remote = there.get_outputs("main").numpy().shape
print("set_input in a session:", remote)
same = direct == remote == (2, 5) and said == "expect a Shape but get ffi.Array"
sys.exit(0 if same else "the behaviour has changed")
PYTHON
cd "$folder"
"$folder/venv/bin/python" "$folder/show.py"
