"""Loops of functions on blocks of channels whose iterations several cores share. Imports TVM.

A function is scheduled once for any number of cores: `share` marks a loop, and `in_parallel` makes
it a parallel one where there are several, and where its work is worth a parallel region.
"""

from __future__ import annotations

import math
from typing import Any

import tvm_ffi
from tvm import tirx
from tvm.s_tir import Schedule

#: Annotation of a loop whose iterations cores may share: steps of all loops within
SHARED = "tuna_shared"
#: Least number of these steps that is worth it
_MIN_STEPS = 1 << 14
#: Number of iterations from which on cores share them evenly
_MIN_ROWS = 8


def in_rows(sch: Schedule, block: Any) -> None:
    """Schedule a block in vectors, and let cores share its rows."""
    *rows, last = sch.get_loops(block)
    sch.vectorize(last)
    if rows:
        share(sch, block, min(len(rows), 3), len(rows))


def share(sch: Schedule, block: Any, loops: int, most: int = 0) -> None:
    """Let cores share the outermost loops of a block: see `in_parallel`. Where these have few
    iterations, as those of an image of one row, up to `most` are shared."""
    every = sch.get_loops(block)
    extents = [int(sch.get(loop).extent) for loop in every]
    while loops < most and math.prod(extents[:loops]) < _MIN_ROWS:
        loops += 1
    sch.annotate(sch.fuse(*every[:loops]), SHARED, math.prod(extents))


def in_parallel(function: Any, cores: int) -> Any:
    """The function with loops that several `cores` share where these are worth it."""

    def shared(loop: Any) -> Any:
        if SHARED not in loop.annotations:
            return loop
        kept = {name: value for name, value in loop.annotations.items() if name != SHARED}
        is_long = int(loop.annotations[SHARED]) >= _MIN_STEPS
        kind = tirx.ForKind.PARALLEL if cores > 1 and is_long else loop.kind
        return tirx.For(loop.loop_var, loop.min, loop.extent, kind, loop.body, annotations=kept)

    return function.with_body(tvm_ffi.structural_map(function.body, (tirx.For, shared)))
