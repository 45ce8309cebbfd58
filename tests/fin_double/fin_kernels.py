"""Simulated kernel objects and times of the fin double, all derived from hashes.

A code object is an ELF magic number followed by pseudo-random bytes, a time is a formula; both are
deterministic.
"""

from __future__ import annotations

import base64
import bz2
import hashlib
import struct
from functools import cache
from typing import Any

from .fin_params import REPEATING, WORDS, perf_configs
from .fin_problem import Device, Problem
from .fin_solvers import WITHOUT_KERNELS, Solver

KernelObject = dict[str, Any]
#: In TFLOP/s.
_SPEEDS = {"GEMM": 6.0, "Direct": 4.0, "Winograd": 9.0, "ImplicitGEMM": 8.0, "FFT": 2.0}
_NAIVE_SPEED, _LAUNCH_MS = 0.2, 0.004
_ROM_BYTES = 4096


def default_params(solver: Solver, problem: Problem, device: Device) -> str:
    """The params that MIOpen uses if no database has any."""
    configs = perf_configs(solver, problem, device)
    return (
        configs[-1]
        if solver.name in REPEATING
        else configs[_hash(solver.name, problem.db_key()) % len(configs)]
    )


def workspace_bytes(solver: Solver, problem: Problem, params: str) -> int:
    """The workspace in bytes, which for some solvers depends on their params."""
    if solver.algorithm == "GEMM" and set(problem.filter) != {1}:
        return _volume((problem.x[0], *problem.filter, *problem.y[1:])) * problem.element_bytes
    if solver.algorithm == "FFT":
        return 8 * problem.batch * _volume(problem.x)
    if "GTCDynamic" in solver.name:
        tile = int(params.split(",")[5]) if params else 0
        transposed = (
            problem.batch * (_volume(problem.x) + _volume(problem.y)) * problem.element_bytes
        )
        return tile * 256 + (transposed if problem.is_default_layout else 0)
    return 0


def time_ms(solver: Solver, problem: Problem, params: str) -> float:
    """A time in milliseconds, rounded to a 32-bit float as fin's are."""
    speed = _NAIVE_SPEED if "Naive" in solver.name else _SPEEDS[solver.algorithm]
    luck = 0.75 + _hash(problem.db_key(), solver.name, params) % 10_000 / 10_000
    rounded: float = struct.unpack(
        "f", struct.pack("f", _LAUNCH_MS + luck * 2e-9 * problem.multiplications / speed)
    )[0]
    return rounded


def fastest(solver: Solver, problem: Problem, device: Device) -> str:
    """The params with the least time, which tuning finds."""
    return min(
        perf_configs(solver, problem, device), key=lambda params: time_ms(solver, problem, params)
    )


def kernel_objects(
    solver: Solver, problem: Problem, device: Device, params: str
) -> list[KernelObject]:
    """The kernel objects of a solver with these params, in fin's format; with duplicates, like
    fin's."""
    if solver.name in WITHOUT_KERNELS:
        return []
    objects = [_kernel_object(*_source(solver, problem, device, params), device.arch)]
    if "GTCDynamic" in solver.name and problem.is_default_layout:
        objects += [_kernel_object("batched_transpose.cpp", "", device.arch)] * 3
    return [dict(kernel) for kernel in objects]


def is_whole(kernel: KernelObject) -> bool:
    """True if a kernel object can be loaded: it decodes to its declared size and MD5."""
    text = kernel["blob"].replace("-", "+").replace("_", "/").replace(".", "=")
    try:
        code = bz2.decompress(base64.b64decode(text, validate=True))
    except (ValueError, OSError):
        return False
    return bool(len(code) == kernel["uncompressed_size"] and _md5(code) == kernel["md5_sum"])


def _source(solver: Solver, problem: Problem, device: Device, params: str) -> tuple[str, str]:
    """The kernel's file name and its compiler options."""
    data_type = problem.data_type.lower()
    if "Naive" in solver.name:
        types = {
            "FP16": 0,
            "FP32": 0,
            "INT8": 0,
            "BFP16": 0,
            problem.data_type.replace("BF16", "BFP16"): 1,
        }
        return "naive_conv.cpp", "".join(f" -DMIOPEN_USE_{name}={on}" for name, on in types.items())
    if solver.name.startswith("ConvBinWinograd"):
        stem = f"Conv_Winograd_{solver.name[len('ConvBinWinograd') :].lower()}_{data_type}"
        stem += f"_stride{problem.strides[0]}"
        return f"{stem}.s", "-Wa,-defsym,ROCM_METADATA_VERSION=5 -mcumode -mwavefrontsize64"
    if "GTCDynamic" in solver.name:
        # The tile is part of the file name, since different params have the same options.
        tile = "x".join(params.split(",")[5:8])
        word, layout = WORDS[problem.direction], "nhwc"
        return (
            f"igemm_{word}_gtcx_{layout}_{data_type}_bx0_ex1_bt{tile}.s",
            " -Wa,-defsym,ROCM_METADATA_VERSION=5",
        )
    form = "-Wa,-defsym,{}={}" if solver.name.startswith("ConvAsm") else "-D{}={}"
    sizes = {
        "BATCH": problem.batch,
        "GROUPS": problem.groups,
        "DIRECTION": "FBW".index(problem.direction),
    }
    names = [("X", problem.x), ("Y", problem.y), ("FILTER", problem.filter), ("PAD", problem.pads)]
    names += [("STRIDE", problem.strides), ("DILATION", problem.dilations)]
    sizes |= {f"{name}{i}": size for name, values in names for i, size in enumerate(values)}
    sizes |= {f"PARAM{i}": int(value) for i, value in enumerate(params.split(",")) if value}
    sizes[f"TYPE_{problem.data_type}"] = 1
    stem = "".join(c if c.isalnum() else "_" for c in solver.name.lower()).strip("_")
    return stem + _suffix(solver.name), "".join(
        " " + form.format(f"P_{name}", size) for name, size in sizes.items()
    )


def _suffix(name: str) -> str:
    if name.startswith(("ConvAsm", "ConvMP", "ConvWino")):
        return ".s"
    if name.startswith("ConvMlir"):
        return ".mlir"
    return ".cl" if name.startswith(("ConvOcl", "fft")) else ".cpp"


@cache
def _kernel_object(kernel_file: str, comp_options: str, arch: str) -> KernelObject:
    seed = f"{kernel_file}\n{comp_options}\n{arch}".encode()
    noise = hashlib.shake_128(seed).digest(1024 + _hash(str(seed)) % 9000)
    code = b"\x7fELF\x02\x01\x01\x40" + bytes(56) + noise * 3 + bytes(_ROM_BYTES)
    return {
        "kernel_file": kernel_file,
        "comp_options": comp_options,
        "uncompressed_size": len(code),
        "md5_sum": _md5(code),
        "blob": base64.b64encode(bz2.compress(code)).decode(),
    }


def _md5(code: bytes) -> str:
    return hashlib.md5(code, usedforsecurity=False).hexdigest()


def _hash(*words: str) -> int:
    return int.from_bytes(hashlib.sha256("|".join(words).encode()).digest()[:6], "big")


def _volume(sizes: tuple[int, ...]) -> int:
    product = 1
    for size in sizes:
        product *= size
    return product
