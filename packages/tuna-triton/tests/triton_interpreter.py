"""Runs a candidate's launches on the CPU by Triton's interpreter, with the arguments that its
artifact would have, and prints the largest error beside NumPy's answer.

    TRITON_INTERPRET=1 python triton_interpreter.py ARCH SOLVER CONFIG PARAMS [BODY]
"""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

import ml_dtypes
import numpy as np
import triton.language as tl
from triton.runtime import interpreter

from tuna.configs import from_json_text
from tuna_triton import builder
from tuna_triton.descriptions import DESCRIPTIONS
from tuna_triton.device_problems import DeviceProblem
from tuna_triton.tiles import TARGETS, Element, tile_of
from tuna_triton.user_kernel import user_kernel

TYPES: dict[str, tuple[Any, Any]] = {
    "fp32": (np.float32, tl.float32),
    "fp16": (np.float16, tl.float16),
    "bf16": (ml_dtypes.bfloat16, tl.bfloat16),
    "fp8e4nv": (ml_dtypes.float8_e4m3fn, tl.float8e4nv),
    "i32": (np.int32, tl.int32),
    "i8": (np.int8, tl.int8),
}


class HostTensor:
    """An array as the interpreter takes one: the parts of a torch.Tensor that it asks for."""

    def __init__(self, array: np.ndarray, dtype: Any) -> None:
        self.array, self.dtype = array, dtype

    def data_ptr(self) -> int:
        return int(self.array.ctypes.data)

    def untyped_storage(self) -> HostTensor:
        return self

    def cpu(self) -> HostTensor:
        return self

    def new_empty(self, *_: Any, **__: Any) -> HostTensor:
        return self

    def set_(self, *_: Any) -> None:
        pass

    def copy_(self, _: Any) -> None:
        pass

    def storage_offset(self) -> int:
        return 0

    size = stride = storage_offset


def mend_interpreter() -> None:
    """Let loops end at a number: Triton 3.6 makes an int of an array, which NumPy 2.4 refuses."""
    original = interpreter._patch_lang_tensor

    def patched(tensor: Any, scope: Any) -> None:
        original(tensor, scope)
        scope.set_attr(tensor, "__index__", lambda self: int(self.handle.data.item()))

    interpreter._patch_lang_tensor = patched


def main() -> None:
    mend_interpreter()
    arch, solver, text, params, *body = sys.argv[1:]
    config, target = from_json_text(text), TARGETS[arch]
    description = user_kernel(Path(*body).read_text()) if body else DESCRIPTIONS[solver]
    tile = dict(tile_of(params, description.tile_names))
    kernel = description.kernel()
    assert kernel is not None
    plan, answers = description.plan(config, tile, target), description.answers(config)
    problem = DeviceProblem(config, {one.name: one for one in plan.buffers})
    arrays = {
        one.name: np.full(one.shape, np.nan, TYPES[one.element][0])
        for one in plan.buffers
        if one.role == "output"
    } | {
        name: content.values().astype(TYPES[content.buffer.element][0])
        for name, content in problem.inputs.items()
    }
    whole = {  # answers of Tuna's own families
        name: problem.expected(name, *map(np.arange, arrays[name].shape))
        for name in arrays.keys() - problem.inputs.keys()
        if not answers
    }
    tensors = {
        one.name: HostTensor(arrays[one.name], TYPES[one.element][1]) for one in plan.buffers
    }
    run = builder._function(kernel)
    for call in plan.calls:
        values = {}
        for name in kernel.arguments:
            value = builder.argument(kernel, call, name)
            if isinstance(value, Element):
                value = TYPES[value.name][1]
            values[name] = tensors[value] if isinstance(value, str) else value
        run[call.grid](**values)
    for one in answers:
        matrix = arrays[one.buffer].reshape(-1, arrays[one.buffer].shape[-1])
        arrays[one.buffer] = matrix[np.ix_(one.rows, one.columns)]
    right_answers = whole | {one.buffer: np.asarray(one.values) for one in answers}
    errors = [
        np.max(np.abs(arrays[name].astype(np.float64) - right)) / np.max(np.abs(right))
        for name, right in right_answers.items()
    ]
    print(max(errors))


if __name__ == "__main__":
    main()
