#!/usr/bin/env bash
# Triton 3.8.0: a comment line above a kernel gives another cache key, another PTX and another cubin,
# though the instructions are the same: the number of the kernel's first line is in all three. So a
# cache that was filled before such an edit, or before an update that moved a kernel by a line, is
# of no use. Compiled for sm_90; no GPU is needed.
set -euo pipefail
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
python3 -m venv "$folder/venv"
"$folder/venv/bin/pip" --quiet install triton==3.8.0
cat >"$folder/plain.py" <<'PYTHON'
import triton
import triton.language as tl


@triton.jit
def double(x, out, n, BLOCK: tl.constexpr):
    at = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    tl.store(out + at, 2 * tl.load(x + at, at < n), at < n)
PYTHON
cat >"$folder/show.py" <<'PYTHON'
import hashlib
import importlib.util
import pathlib
import sys

import triton
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource

folder = pathlib.Path(sys.argv[1])
print("triton", triton.__version__)


def compiled(text):
    path = folder / "kernel.py"  # the same path, for it is in the debug information as well
    path.write_text(text)
    spec = importlib.util.spec_from_file_location("kernel", path)
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    types = {"x": "*fp32", "out": "*fp32", "n": "i32", "BLOCK": "constexpr"}
    source = ASTSource(module.double, types, {"BLOCK": 128})
    made = triton.compile(source, target=GPUTarget("cuda", 90, 32))
    ptx = made.asm["ptx"].splitlines()
    code = [line for line in ptx if line.startswith("\t") and not line.startswith("\t.loc")]
    code = code[: next(i for i, line in enumerate(code) if ".section" in line or "ret;" in line)]
    digest = lambda data: hashlib.sha256(data).hexdigest()[:12]
    return {
        "key": made.hash[:12],
        "ptx": digest(made.asm["ptx"].encode()),
        "cubin": digest(made.asm["cubin"]),
        "instructions": digest("\n".join(code).encode()),
    }


import linecache

text = (folder / "plain.py").read_text()
seen = [compiled(text)]
linecache.clearcache()
seen.append(compiled(text.replace("@triton.jit", "# a comment\n@triton.jit")))
for name in seen[0]:
    first, second = seen[0][name], seen[1][name]
    print(f"{name:13} {first} {second} {'same' if first == second else 'differs'}")
same = {name for name in seen[0] if seen[0][name] == seen[1][name]}
sys.exit("the behaviour has changed" if same != {"instructions"} else 0)
PYTHON
TRITON_CACHE_DIR="$folder/cache" "$folder/venv/bin/python" "$folder/show.py" "$folder"
