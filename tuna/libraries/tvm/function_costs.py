"""Estimates of a function without a core: what a call moves and what it computes. Imports TVM."""

from __future__ import annotations

import math
from collections import defaultdict
from dataclasses import dataclass
from typing import Any

import numpy as np
import tvm
import tvm_ffi
from tvm import tirx
from tvm.s_tir import SBlock
from tvm.s_tir.analysis import estimate_tir_flops

#: Attribute of a function that is written as loops of its own: the operations of its multiply-adds,
#: of which there is neither an estimate nor a schedule by rule
OPERATIONS = "tuna.operations"
#: Bytes and operations of a cycle, of code that is in vectors and reads what another function wrote
_BYTES, _OPERATIONS = 8.0, 8.0
#: Factor of the time of code in vectors whose data is in L2: pools of 0.4 to 2 MB take a quarter to
#: an eighth of the estimate.
_CACHED = 0.3


@dataclass(frozen=True)
class Cost:
    """Work of one call."""

    moved_bytes: float
    operations: float

    @property
    def cycles(self) -> float:
        """Rough estimate of the time on one core."""
        return self.moved_bytes / _BYTES + self.operations / _OPERATIONS

    @property
    def least_cycles(self) -> float:
        """The same where all that it moves is in a core's cache."""
        return self.cycles * _CACHED


def of_function(function: Any) -> Cost:
    """The cost of a call."""
    stated = (function.attrs or {}).get(OPERATIONS)
    if stated is not None:
        return Cost(moved_bytes(function), float(stated))
    # TVM's estimate raises InternalError for a Let, as bf16 is rounded with: its value and its body
    # count once each
    summed = tvm_ffi.structural_map(
        function.body,
        (tirx.Let, lambda let: let.body + tirx.Cast(let.body.ty, let.value)),
    )
    operations = estimate_tir_flops(tvm.IRModule({"main": function.with_body(summed)}))
    return Cost(moved_bytes(function), operations)


def moved_bytes(function: Any) -> float:
    """Bytes of a function's arguments. Of a tensor that stages read at places, such as a table of
    embeddings, as many values count as they read."""
    reads: dict[Any, float] = defaultdict(float)

    def visit(stage: Any) -> None:
        for region in stage.reads:
            reads[region.source] += _iterations(stage)

    tvm_ffi.structural_walk(function.body, (SBlock, visit))
    moved = 0.0
    for tensor in function.params:
        values = math.prod(int(extent) for extent in tensor.shape)
        moved += np.dtype(str(tensor.dtype)).itemsize * min(values, reads.get(tensor, math.inf))
    return moved


def _iterations(stage: Any) -> float:
    """How often a stage computes a value; infinite where it has loops of its own."""
    extents = [axis.dom.extent for axis in stage.iter_vars]
    if not extents or not all(isinstance(extent, tirx.IntImm) for extent in extents):
        return math.inf
    return float(math.prod(map(int, extents)))
