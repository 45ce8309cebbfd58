"""Tasks of a model without a core: their functions as text, what can be tuned of them, and the
right answer. Imports TVM.

The text is TVM's JSON of the TIR function. Nothing is executed to read it, as TVMScript would be.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import tvm
import tvm_ffi
from tvm import relax
from tvm.s_tir import SBlock
from tvm.s_tir.analysis import estimate_tir_flops
from tvm.s_tir.meta_schedule.arg_info import ArgInfo

from tuna.configs.values import DataType
from tuna.errors import BadInput
from tuna.libraries.reference import TOLERANCE, Problem

#: Bytes and operations of a cycle, of code that is in vectors and reads what another function
#: wrote.
_BYTES, _OPERATIONS = 8.0, 8.0


def to_text(function: Any) -> str:
    """The function, called `main`, as text that is the same in every process."""
    return str(tvm.ir.save_json(function.with_attr("global_symbol", "main")))


def module_of(text: str) -> tvm.IRModule:
    """A module with the function of a text; raises BadInput for a text that is none."""
    try:
        function = tvm.ir.load_json(text)
        return tvm.IRModule({"main": function})
    except Exception as error:  # TVM's reader has many ways to fail
        raise BadInput(
            f"A task's text cannot be read: {str(error).strip().splitlines()[-1][:200]}"
        ) from error


def read(body: str) -> tvm.IRModule:
    """The module of a task from the file with its text."""
    return module_of(Path(body).read_text(encoding="utf-8"))


def can_be_tuned(module: tvm.IRModule) -> bool:
    """Whether the function computes one fp32 tensor from others whose values may be any: no
    indices, no view."""
    function = module["main"]
    if relax.analysis.has_reshape_pattern(function) or {kind for _, kind in _arguments(module)} != {
        "float32"
    }:
        return False
    written: list[Any] = []
    tvm_ffi.structural_walk(
        function.body,
        (SBlock, lambda block: written.extend(region.source for region in block.writes)),
    )
    outputs = [any(param.same_as(buffer) for buffer in written) for param in function.params]
    return outputs == [False] * (len(outputs) - 1) + [True] and len(outputs) > 1


def cycles(module: tvm.IRModule) -> float:
    """Rough estimate of what a call takes: what it moves and what it computes."""
    moved = sum(np.dtype(kind).itemsize * np.prod(shape) for shape, kind in _arguments(module))
    return float(moved / _BYTES + estimate_tir_flops(module) / _OPERATIONS)


def problem(module: tvm.IRModule, target: Any) -> Problem:
    """Random inputs and what the function computes as it was imported, compiled without a schedule.

    Raises BadInput for a function whose answer to them is not finite.
    """
    *inputs, (shape, kind) = _arguments(module)
    run = tvm.tirx.build(module, target=target)["main"]
    for low in (-1.0, 0.1):  # a root or a logarithm wants what is positive
        generator = np.random.default_rng(0)
        given = tuple(
            generator.uniform(low, 1.0, extents).astype(np.float32) for extents, _ in inputs
        )
        answer = tvm.runtime.tensor(np.full(shape, np.nan, kind))
        run(*map(tvm.runtime.tensor, given), answer)
        if np.all(np.isfinite(answer.numpy())):
            return Problem(given, answer.numpy().astype(np.float64), kind, TOLERANCE[DataType.FP32])
    raise BadInput("The function's answer to random numbers is not finite.")


def _arguments(module: tvm.IRModule) -> list[tuple[tuple[int, ...], str]]:
    """Shape and type of each argument."""
    found = ArgInfo.from_entry_func(module, remove_preproc=True)
    return [(tuple(int(extent) for extent in one.shape), str(one.dtype)) for one in found]
