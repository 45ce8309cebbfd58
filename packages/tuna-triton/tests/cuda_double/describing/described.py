"""Scripts for the stand-in of NVIDIA's driver that say what a build of Triton's computes: the names
of its arguments, and what became constants of it."""

from __future__ import annotations

import fcntl
import functools
import math
import os
import zlib
from collections.abc import Mapping
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any

#: What a kernel computes (`run=` of named_kernels.h), by its name.
_RUN = {
    **dict.fromkeys(("moe", "fused_moe_kernel"), "moe"),
    **dict.fromkeys(("gemm", "block_fp8_gemm"), "matmul"),
    **dict.fromkeys(("_w8a8_triton_block_scaled_mm", "_w8a8_block_fp8_matmul"), "matmul"),
}
_BYTES = {"fp32": 4, "fp64": 8, "i32": 4, "i64": 8, "u64": 8}


def watch(builder: ModuleType) -> None:
    """Let the builder's module add a script for each launch of a kernel in `_RUN` that it builds,
    beside the stand-in."""
    path = Path(os.environ["LD_LIBRARY_PATH"], "script")
    make_launch = builder._launch

    def launched(source: Any, binary: Any, call: Any, number: int) -> Any:
        if source.kernel.function in _RUN:
            _add(path, script(builder, source, binary, call))
        return make_launch(source, binary, call, number)

    builder._launch = launched


def watch_jit(module: ModuleType) -> None:
    """Let the benchmark's module add a script for each kernel that Triton's JIT launches for it."""
    from tuna_triton import builder

    path = Path(os.environ["LD_LIBRARY_PATH"], "script")
    launch = module.JitCuda.launch

    def launched(self: Any, plan: Any, call: Any, values: Mapping[str, Any]) -> Any:
        made = self.function.warmup(grid=call.grid, **values)
        target = module.TARGETS[self.facts.arch]
        source = builder.specialise(self.kernel_file, plan, call, target)
        binary = SimpleNamespace(symbol=made.metadata.name, code=made.asm["cubin"])
        _add(path, script(builder, source, binary, call))
        return launch(self, plan, call, values)

    module.JitCuda.launch = launched


@functools.cache
def _add(path: Path, line: str) -> None:
    with path.open("a") as file:
        fcntl.flock(file, fcntl.LOCK_EX)
        file.write(line + "\n")


def script(builder: ModuleType, source: Any, binary: Any, call: Any) -> str:
    """The line of one launch."""
    kernel = source.kernel
    given = {name: builder.argument(kernel, call, name) for name in kernel.arguments}
    passed = [
        (name, kind)
        for name, kind in zip(kernel.arguments, source.types, strict=True)
        if kind != "constexpr"
    ]
    constants = {
        name: int(value)
        for name, value in given.items()
        if isinstance(value, int | float) and name not in dict(passed)
    }
    sizes = [8 if kind[0] == "*" else _BYTES[kind] for _, kind in passed]
    words = {
        "name": binary.symbol,
        "code": f"{len(binary.code)}-{zlib.crc32(binary.code):08x}",
        "params": ",".join(map(str, [*sizes, 8, 8])),
        "run": _RUN[kernel.function],
        "names": ",".join([*(name for name, _ in passed), *2 * ["-"]]),
        "types": ",".join([*(kind.lstrip("*") for _, kind in passed), *2 * ["*"]]),
        **constants,
        **_time(call.arguments),
    }
    return " ".join(f"{name}={value}" for name, value in words.items())


def _time(arguments: Mapping[str, Any]) -> dict[str, str]:
    """Made-up microseconds of a launch, which depend on the tile as real ones do: smoothly, with
    one best tile, and on the number of programs."""
    height, width, depth = (arguments[f"BLOCK_SIZE_{letter}"] for letter in "MNK")
    speed = 1.0
    for value, best in ((width, 128), (depth, 64), (arguments["num_warps"], 8)):
        speed *= 0.8 ** abs(math.log2(value / best))
    speed *= 1 + 0.05 * arguments["num_stages"] - 0.02 * math.log2(arguments["GROUP_SIZE_M"])
    program_us = 1e-4 * (height + 16) * width * arguments["K"] / 132 / speed / 4
    return {"time_us": "2", "block_us": f"{program_us:.6g}", "spread": "0.01"}
