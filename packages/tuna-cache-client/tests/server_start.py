"""Compiles products of several tiles as a server does at its start, or has them from a cache, and
prints how many were compiled, the seconds from the interpreter's start on, and the digests.

    python server_start.py sm_90|gfx942 TILES
"""

from __future__ import annotations

import time

BEGIN = time.perf_counter()

import hashlib
import itertools
import json
import sys
from typing import Any

import triton
import triton.language as tl
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource

TARGETS = {"sm_90": GPUTarget("cuda", 90, 32), "gfx942": GPUTarget("hip", "gfx942", 64)}


@triton.jit
def product(a, b, c, M, N, K, TM: tl.constexpr, TN: tl.constexpr, TK: tl.constexpr):  # noqa: N803
    # tiles of C by rows
    row = tl.program_id(0) * TM + tl.arange(0, TM)
    column = tl.program_id(1) * TN + tl.arange(0, TN)
    at = tl.arange(0, TK)
    total = tl.zeros((TM, TN), tl.float32)
    for start in range(0, K, TK):
        left = tl.load(a + row[:, None] * K + (start + at)[None, :])
        right = tl.load(b + (start + at)[:, None] * N + column[None, :])
        total = tl.dot(left, right, total)
    tl.store(c + row[:, None] * N + column[None, :], total, row[:, None] < M)


def main(arch: str, count: int) -> None:
    """Print the figures as JSON."""
    compiled = 0
    make_ir = ASTSource.make_ir

    def counted(*args: Any) -> Any:
        nonlocal compiled
        compiled += 1
        return make_ir(*args)

    ASTSource.make_ir = counted
    types = {"a": "*fp16", "b": "*fp16", "c": "*fp32", "M": "i32", "N": "i32", "K": "i32"}
    types |= dict.fromkeys(("TM", "TN", "TK"), "constexpr")
    sides = (64, 128, 32, 256)
    tiles = itertools.product(sides, sides, (64, 32, 128), (4, 8), (3, 2, 4))
    code = []
    for rows, columns, deep, warps, stages in itertools.islice(tiles, count):
        source = ASTSource(product, types, {"TM": rows, "TN": columns, "TK": deep})
        options = {"num_warps": warps, "num_stages": stages}
        made = triton.compile(source, target=TARGETS[arch], options=options)
        code.append(hashlib.sha256(made.kernel).hexdigest())
    start_s = time.perf_counter() - BEGIN
    print(json.dumps({"compiled": compiled, "start_s": start_s, "code": code}))


if __name__ == "__main__":
    main(sys.argv[1], int(sys.argv[2]))
