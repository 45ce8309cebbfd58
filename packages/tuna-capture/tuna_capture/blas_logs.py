"""Matrix products in logs of column-major BLAS libraries: hipBLASLt and PyTorch's TunableOp.

hipBLASLt logs `hipblaslt-bench` commands with `HIPBLASLT_LOG_MASK=32`; flags and defaults are those
of that program. TunableOp's files have products to tune (`*_untuned*.csv`) and results in rows:

    GemmTunableOp_BFloat16_TN,tn_8192_1_4096_ld_4096_4096_8192[,SOLUTION,TIME]

The words are TRANSPOSES_M_N_K[_B_BATCH][_ld_LDA_LDB_LDC][_rw_ROWWISE][_bias_TYPE] in BLAS' order,
column-major. The strides of a batch are not among them; they count as packed.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass

from tuna.configs.flags import whole_number
from tuna.configs.gemm import GemmConfig
from tuna.configs.lines import LineForm, UnsupportedLine
from tuna.configs.values import DataType
from tuna.errors import BadInput


@dataclass(frozen=True)
class _Matrix:
    """A column-major matrix of a BLAS call."""

    data_type: DataType
    transposed: bool = False
    leading: int | None = None  #: leading dimension; None: packed
    stride: int | None = None  #: elements between two matrices of a batch; None: packed
    scale: str = ""


@dataclass(frozen=True)
class _Product:
    """C = op(A) op(B) of column-major matrices."""

    m: int
    n: int
    k: int
    a: _Matrix
    b: _Matrix
    c: _Matrix
    batch_count: int = 1
    compute_type: str | None = None

    def config(self) -> GemmConfig:
        """Return the same in row-major order: the transposed matrices, in the other order.

        Raises BadInput if a config cannot hold it.
        """
        if min(self.m, self.n, self.k, self.batch_count) == 0:
            raise UnsupportedLine("Tuna does not tune products of empty matrices")
        a, b, c = self.b, self.a, self.c
        return GemmConfig(
            *(self.n, self.m, self.k, self.batch_count),
            *(a.transposed, b.transposed, a.data_type),
            *(a.leading, b.leading, c.leading, a.stride, b.stride, c.stride),
            *(b.data_type, c.data_type, self.compute_type),
            *(a.scale, b.scale, c.scale),
        )


_PROGRAM = "hipblaslt-bench"
_HIP_TYPES: dict[str, DataType] = {
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
#: Type to which inputs are rounded, by the value of `--compute_type`
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
#: Flags of the run itself, which do not describe the product
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
_BENCH_NUMBERS = (
    *("-m", "-n", "-k", "--batch_count"),
    *("--lda", "--ldb", "--ldd", "--stride_a", "--stride_b", "--stride_d"),
)
_WORDS = (
    *("--transA", "--transB", "--a_type", "--b_type", "--d_type"),
    *("--compute_type", "--scaleA", "--scaleB", "--scaleD"),
)
#: Flags of every logged line; a line without one of them is cut short
_NEEDED = ("-m", "-n", "-k", "--transA", "--transB", "--a_type", "--b_type", "--compute_type")
_BENCH_FLAGS = frozenset((*_BENCH_NUMBERS, *_WORDS, "--ldc", "--stride_c", "--c_type"))
#: Computations beside the product: name, and the value that switches each off
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


def _bench_flags(line: str) -> dict[str, str]:
    """Each flag with its value, `1` for one that stands alone; raises BadInput."""
    found: dict[str, str] = {}
    flag = ""
    for word in line.partition(_PROGRAM)[2].split():
        if _FLAG.fullmatch(word) and word != "-inf":
            if word in found and word in _BENCH_NUMBERS:
                raise UnsupportedLine("Tuna does not tune groups of products")
            flag, found[word] = word, ""
        elif not flag or found[flag]:
            raise BadInput(f"{word[:40]!r} is where a flag is expected")
        else:
            found[flag] = word
    if "--grouped_gemm" in found:
        raise UnsupportedLine("Tuna does not tune groups of products")
    return {name: value or "1" for name, value in found.items()}


def _read_bench(line: str) -> list[GemmConfig]:
    flags = _bench_flags(line)
    missing = [name for name in _NEEDED if name not in flags]
    if missing:
        raise BadInput(f"the {_PROGRAM} command has no {missing[0]}: it is cut short")
    for name in flags:
        if not (name in _BENCH_FLAGS or name in _IGNORED or name in _BESIDE):
            raise BadInput(f"unknown flag {name[:40]} of {_PROGRAM}")
    numbers = {name: whole_number(name, flags[name]) for name in _BENCH_NUMBERS if name in flags}
    compute = flags["--compute_type"]
    if compute not in _COMPUTE:
        raise UnsupportedLine(
            f"Tuna does not tune products with hipBLASLt's compute type {compute[:40]}"
        )
    a, b, c = (_bench_matrix(letter, flags, numbers) for letter in "abd")
    m, n, k = (numbers[name] for name in ("-m", "-n", "-k"))
    product = _Product(m, n, k, a, b, c, numbers.get("--batch_count", 1), _COMPUTE[compute])
    return [product.config()]


def _bench_matrix(letter: str, flags: dict[str, str], numbers: dict[str, int]) -> _Matrix:
    trans = flags.get(f"--trans{letter.upper()}", "N")
    scale = flags.get(f"--scale{letter.upper()}", "0")
    name = flags.get(f"--{letter}_type") or flags.get("--c_type") or flags["--a_type"]
    if trans not in ("N", "T", "C"):
        raise BadInput(f"--trans{letter.upper()} must be N, T or C, got {trans[:40]!r}")
    if scale not in _SCALES:
        raise UnsupportedLine(f"Tuna does not tune products with hipBLASLt's scale {scale[:40]}")
    if name not in _HIP_TYPES:
        raise UnsupportedLine(f"Tuna has no type for hipBLASLt's {name[:40]}")
    stride = numbers.get(f"--stride_{letter}")
    if letter == "d" and stride == 0:  # hipBLASLt logs 0 for a product without a batch
        stride = None
    return _Matrix(
        _HIP_TYPES[name], trans != "N", numbers.get(f"--ld{letter}"), stride, _SCALES[scale]
    )


def _beside_bench(line: str) -> Sequence[str]:
    flags = _bench_flags(line)
    found = []
    for name, (what, neutral) in _BESIDE.items():
        value = flags.get(name, neutral)
        if value != neutral and not (
            neutral == "0" and value.replace("0", "").replace(".", "") == ""
        ):
            found.append(f"{what} ({value})" if neutral == "none" else what)
    return found


HIPBLASLT = LineForm(
    "hipBLASLt bench line",
    recognises=lambda line: _PROGRAM in line,
    read=_read_bench,
    asks_for=lambda line: line[line.index(_PROGRAM) :],
    left_out=_beside_bench,
)


_TORCH_TYPES: dict[str, DataType] = {
    "float": DataType.FP32,
    "tf32": DataType.FP32,
    "Half": DataType.FP16,
    "BFloat16": DataType.BF16,
    "Float8_e4m3fn": DataType.FP8_E4M3,
    "Float8_e5m2": DataType.FP8_E5M2,
    "Float8_e4m3fnuz": DataType.FP8_E4M3FNUZ,
    "Float8_e5m2fnuz": DataType.FP8_E5M2FNUZ,
}
_ROW = re.compile(r"(Validator,|[A-Za-z]*TunableOp_)")
_OPERATION = re.compile(r"(Gemm|GemmAndBias|GemmStridedBatched|ScaledGemm)TunableOp_(.+)_[NTC]{2}")
_TYPE_NAME = re.compile(r"Float8_[a-z0-9]+|[A-Za-z0-9:<>]+")
_ROW_SIZES = re.compile(
    r"([ntc])([ntc])_(\d+)_(\d+)_(\d+)(?:_B_(\d+))?(?:_ld_(\d+)_(\d+)_(\d+))?"
    r"(?:_rw_([01]))?(?:_bias_(\w+))?"
)


def _row_of(line: str) -> str | None:
    return None if line.startswith("Validator,") else ",".join(line.split(",", 2)[:2])


def _read_row(line: str) -> list[GemmConfig]:
    operation, _, params = (_row_of(line) or "").partition(",")
    match = _OPERATION.fullmatch(operation)
    if match is None:
        raise UnsupportedLine(f"Tuna does not tune TunableOp's {operation[:80]}")
    if "*" in params:
        raise UnsupportedLine("Tuna does not tune products of sizes that vary (*)")
    parts = _ROW_SIZES.fullmatch(params)
    if parts is None:
        raise BadInput(f"the sizes of TunableOp's row cannot be read: {params[:80]}")
    names = _TYPE_NAME.findall(match[2])
    a, b, c = names if len(names) == 3 else names * 3 if len(names) == 1 else ("", "", "")
    unknown = [name for name in (a, b, c) if name not in _TORCH_TYPES]
    if unknown:
        raise UnsupportedLine(f"Tuna has no type for TunableOp's {match[2][:80]}")
    m, n, k = (int(parts[place]) for place in (3, 4, 5))
    lda, ldb, ldc = (int(parts[place]) if parts[place] else None for place in (7, 8, 9))
    scale = "" if match[1] != "ScaledGemm" else "vector" if parts[10] == "1" else "tensor"
    first = _Matrix(_TORCH_TYPES[a], parts[1] != "n", lda, scale=scale)
    second = _Matrix(_TORCH_TYPES[b], parts[2] != "n", ldb, scale=scale)
    third = _Matrix(_TORCH_TYPES[c], leading=ldc)
    compute = "TF32" if "tf32" in names else None
    return [_Product(m, n, k, first, second, third, int(parts[6] or 1), compute).config()]


def _beside_row(line: str) -> Sequence[str]:
    biased = line.startswith("GemmAndBias") or re.search(r"_bias_(?!None)\w", line)
    return ["a bias"] if biased else []


TUNABLEOP = LineForm(
    "row of a TunableOp file",
    recognises=lambda line: _ROW.match(line) is not None,
    read=_read_row,
    asks_for=_row_of,
    left_out=_beside_row,
)
