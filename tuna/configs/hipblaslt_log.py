"""Lines that hipBLASLt logs with `HIPBLASLT_LOG_MASK=32`: `hipblaslt-bench` commands.

Flags and defaults are those of `hipblaslt-bench`; matrices are column-major.
"""

from __future__ import annotations

import re
from collections.abc import Sequence

from tuna.configs.blas import BlasProduct, Matrix
from tuna.configs.flags import whole_number
from tuna.configs.gemm import GemmConfig
from tuna.configs.lines import LineForm, UnsupportedLine
from tuna.configs.values import DataType
from tuna.errors import BadInput

_PROGRAM = "hipblaslt-bench"
_TYPES: dict[str, DataType] = {
    "f32_r": DataType.FP32,
    "f16_r": DataType.FP16,
    "bf16_r": DataType.BF16,
    "i8_r": DataType.INT8,
    "i32_r": DataType.INT32,
    "f8_r": DataType.FP8_E4M3,
    "bf8_r": DataType.FP8_E5M2,
    "f8_fnuz_r": DataType.FP8_E4M3FNUZ,
    "bf8_fnuz_r": DataType.FP8_E5M2FNUZ,
}
#: Type to which inputs are rounded, by `--compute_type`.
_COMPUTE = {
    "f32_r": None,
    "i32_r": None,
    "xf32_r": "TF32",
    "f32_f16_r": "FP16",
    "f32_bf16_r": "BF16",
}
_SCALES = {
    "0": "",
    "1": "tensor",
    "2": "vector",
    "3": "block32_e8m0",
    "4": "block16_e8m0",
    "5": "block32_e4m3",
    "6": "block16_e4m3",
    "7": "block32_e5m3",
    "8": "block16_e5m3",
}
#: Flags of the run itself, which do not describe the product.
_IGNORED = frozenset(
    (
        *("--api_method", "--function", "-f", "--alpha", "--algo_method", "--solution_index"),
        *("--requested_solution", "--scale_type", "--bias_type", "--bias_source", "--aux_type"),
        *("--activation_arg1", "--activation_arg2", "--iters", "-i"),
        *("--cold_iters", "-j", "--verify", "-v"),
        *("--rotating", "--initialization", "--workspace"),
        *("--device", "--use_gpu_timer", "--flush"),
        *("--print_kernel_info", "--c_equal_d", "--c_noalias_d"),
        *("--any_stride", "--compute_input_typeA"),
        *("--compute_input_typeB", "--splitk", "--precision", "--skip_slow_solution_ratio"),
        *("--use_user_args", "--norm_check", "--allclose_check"),
    )
)
_NUMBERS = (
    "-m",
    "-n",
    "-k",
    "--batch_count",
    "--lda",
    "--ldb",
    "--ldd",
    "--stride_a",
    "--stride_b",
    "--stride_d",
)
_WORDS = (
    "--transA",
    "--transB",
    "--a_type",
    "--b_type",
    "--d_type",
    "--compute_type",
    "--scaleA",
    "--scaleB",
    "--scaleD",
)
#: Flags of every logged line; a line without one is cut short.
_NEEDED = ("-m", "-n", "-k", "--transA", "--transB", "--a_type", "--b_type", "--compute_type")
_KNOWN = frozenset((*_NUMBERS, *_WORDS, "--ldc", "--stride_c", "--c_type"))
#: Computations beside the product: name and the value that switches each off.
_BESIDE = {
    "--beta": ("C added to the answer", "0"),
    "--bias_vector": ("a bias", "0"),
    "--activation_type": ("an activation", "none"),
    "--scaleAlpha_vector": ("a vector of alpha", "0"),
    "--scaleC": ("a scale of the C that is added", "0"),
    "--amaxScaleA": ("the largest magnitude of A", "0"),
    "--amaxScaleB": ("the largest magnitude of B", "0"),
    "--amaxD": ("the largest magnitude of the answer", "0"),
    "--use_e": ("an auxiliary matrix", "0"),
    "--gradient": ("a gradient", "0"),
}
_FLAG = re.compile(r"--?[A-Za-z_]\w*")


def _flags(line: str) -> dict[str, str]:
    """Each flag with its value, `1` for one that stands alone; raises BadInput."""
    found: dict[str, str] = {}
    flag = ""
    for word in line.partition(_PROGRAM)[2].split():
        if _FLAG.fullmatch(word) and word != "-inf":
            if word in found and word in _NUMBERS:
                raise UnsupportedLine("Tuna does not tune groups of products")
            flag, found[word] = word, ""
        elif not flag or found[flag]:
            raise BadInput(f"{word[:40]!r} is where a flag is expected")
        else:
            found[flag] = word
    if "--grouped_gemm" in found:
        raise UnsupportedLine("Tuna does not tune groups of products")
    return {name: value or "1" for name, value in found.items()}


def _read(line: str) -> list[GemmConfig]:
    flags = _flags(line)
    missing = [name for name in _NEEDED if name not in flags]
    if missing:
        raise BadInput(f"the {_PROGRAM} command has no {missing[0]}: it is cut short")
    for name in flags:
        if not (name in _KNOWN or name in _IGNORED or name in _BESIDE):
            raise BadInput(f"unknown flag {name[:40]} of {_PROGRAM}")
    numbers = {name: whole_number(name, flags[name]) for name in _NUMBERS if name in flags}
    compute = flags["--compute_type"]
    if compute not in _COMPUTE:
        raise UnsupportedLine(
            f"Tuna does not tune products with hipBLASLt's compute type {compute[:40]}"
        )
    a, b, c = (_matrix(letter, flags, numbers) for letter in "abd")
    m, n, k = (numbers[name] for name in ("-m", "-n", "-k"))
    product = BlasProduct(m, n, k, a, b, c, numbers.get("--batch_count", 1), _COMPUTE[compute])
    return [product.config()]


def _matrix(letter: str, flags: dict[str, str], numbers: dict[str, int]) -> Matrix:
    trans = flags.get(f"--trans{letter.upper()}", "N")
    scale = flags.get(f"--scale{letter.upper()}", "0")
    name = flags.get(f"--{letter}_type") or flags.get("--c_type") or flags["--a_type"]
    if trans not in ("N", "T", "C"):
        raise BadInput(f"--trans{letter.upper()} must be N, T or C, got {trans[:40]!r}")
    if scale not in _SCALES:
        raise UnsupportedLine(f"Tuna does not tune products with hipBLASLt's scale {scale[:40]}")
    if name not in _TYPES:
        raise UnsupportedLine(f"Tuna has no type for hipBLASLt's {name[:40]}")
    stride = numbers.get(f"--stride_{letter}")
    if letter == "d" and stride == 0:  # hipBLASLt logs 0 for a product without a batch
        stride = None
    return Matrix(_TYPES[name], trans != "N", numbers.get(f"--ld{letter}"), stride, _SCALES[scale])


def _left_out(line: str) -> Sequence[str]:
    flags = _flags(line)
    found = []
    for name, (what, neutral) in _BESIDE.items():
        value = flags.get(name, neutral)
        if value != neutral and not (
            neutral == "0" and value.replace("0", "").replace(".", "") == ""
        ):
            found.append(f"{what} ({value})" if neutral == "none" else what)
    return found


LINE_FORM = LineForm(
    "hipBLASLt bench line",
    recognises=lambda line: _PROGRAM in line,
    read=_read,
    asks_for=lambda line: line[line.index(_PROGRAM) :],
    left_out=_left_out,
)
