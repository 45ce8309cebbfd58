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
from tuna_triton.moe import MoeConfig
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


def filled(buffers: Any, config: Any, tile: dict[str, int]) -> dict[str, np.ndarray]:
    """Random inputs, sorted rows, and outputs full of NaN."""
    chance, arrays = np.random.default_rng(1), {}
    for one in buffers:
        kind = TYPES[one.element][0]
        if one.role == "output":
            arrays[one.name] = np.full(one.shape, np.nan, kind)
        elif one.element == "i8":
            arrays[one.name] = chance.integers(-8, 8, one.shape, np.int8)
        elif one.element != "i32":
            arrays[one.name] = chance.uniform(0.1, 1, one.shape).astype(kind)
            if one.name.endswith(("_a", "_b")) or one.name in ("a", "b"):
                arrays[one.name] = chance.uniform(-1, 1, one.shape).astype(kind)
    if isinstance(config, MoeConfig):
        arrays |= sorted_rows(buffers, config, tile["BLOCK_SIZE_M"])
    return arrays


def routing(config: MoeConfig) -> np.ndarray:
    """The expert of each row."""
    chance = np.random.default_rng(2)
    rows = [chance.permutation(config.experts)[: config.topk] for _ in range(config.tokens)]
    return np.concatenate(rows)


def sorted_rows(buffers: Any, config: MoeConfig, height: int) -> dict[str, np.ndarray]:
    """Rows by expert, padded to whole tiles."""
    shapes = {one.name: one.shape for one in buffers}
    experts, rows, owners = routing(config), [], []
    for expert in range(config.experts):
        mine = list(np.flatnonzero(experts == expert))
        mine += [experts.size] * (-len(mine) % height)
        rows += mine
        owners += [expert] * (len(mine) // height)
    ids = np.full(shapes["sorted_token_ids"], experts.size, np.int32)
    ids[: len(rows)] = rows
    found = np.zeros(shapes["expert_ids"], np.int32)
    found[: len(owners)] = owners
    padded = np.asarray([len(rows)], np.int32)
    return {"sorted_token_ids": ids, "expert_ids": found, "num_tokens_post_padded": padded}


def scaled(arrays: dict[str, np.ndarray], name: str, prefix: str, config: Any) -> np.ndarray:
    """An input in double precision, with its factors."""
    value = arrays[f"{prefix}{name}"].astype(np.float64)
    scale = arrays.get(f"{prefix}{name}_scale")
    if scale is None:
        return value
    if scale.ndim == value.ndim and scale.ndim > 1:  # by blocks
        for axis, (whole, parts) in enumerate(zip(value.shape, scale.shape, strict=True)):
            scale = np.repeat(scale, -(-whole // parts), axis) if parts != whole else scale
        return value * scale[tuple(slice(0, size) for size in value.shape)]
    return value * scale.reshape(scale.shape + (1,) * (value.ndim - scale.ndim))


def expected(arrays: dict[str, np.ndarray], config: Any) -> dict[str, np.ndarray]:
    """The answers by NumPy."""
    if not isinstance(config, MoeConfig):
        a, b = (scaled(arrays, name, "", config) for name in "ab")
        return {"c": a @ (b.T if config.trans_b else b)}
    experts = routing(config)
    found = {}
    for prefix in ("up_", "down_"):
        a, b = (scaled(arrays, name, prefix, config) for name in "ab")
        tokens = np.arange(experts.size) // (config.topk if prefix == "up_" else 1)
        answer = np.einsum("rk,rnk->rn", a[tokens], b[experts])
        if prefix == "down_":
            answer *= arrays["topk_weights"].astype(np.float64)[:, None]
        found[f"{prefix}c"] = answer
    return found


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
    plan = description.plan(config, tile, target)
    arrays = filled(plan.buffers, config, tile)
    if body:
        problem = DeviceProblem(config, {one.name: one for one in plan.buffers})
        arrays |= {
            name: content.values().astype(TYPES[content.buffer.element][0])
            for name, content in problem.inputs.items()
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
    for one in description.answers(config):
        whole = arrays[one.buffer].reshape(-1, arrays[one.buffer].shape[-1])
        arrays[one.buffer] = whole[np.ix_(one.rows, one.columns)]
    right = {one.buffer: np.asarray(one.values) for one in description.answers(config)}
    errors = [
        np.max(np.abs(arrays[name].astype(np.float64) - right)) / np.max(np.abs(right))
        for name, right in (right or expected(arrays, config)).items()
    ]
    print(max(errors))


if __name__ == "__main__":
    main()
