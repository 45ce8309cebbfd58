"""Rows in the files of PyTorch's TunableOp: products to tune (`*_untuned*.csv`) and results.

    GemmTunableOp_BFloat16_TN,tn_8192_1_4096_ld_4096_4096_8192[,SOLUTION,TIME]

The words are TRANSPOSES_M_N_K[_B_BATCH][_ld_LDA_LDB_LDC][_rw_ROWWISE][_bias_TYPE] in BLAS' order,
column-major. The strides of a batch are not among them; they count as packed.
"""

from __future__ import annotations

import re
from collections.abc import Sequence

from tuna.configs.blas import BlasProduct, Matrix
from tuna.configs.gemm import GemmConfig
from tuna.configs.lines import LineForm, UnsupportedLine
from tuna.configs.values import DataType
from tuna.errors import BadInput

_TYPES: dict[str, DataType] = {
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
_NAME = re.compile(r"Float8_[a-z0-9]+|[A-Za-z0-9:<>]+")
_PARAMS = re.compile(
    r"([ntc])([ntc])_(\d+)_(\d+)_(\d+)(?:_B_(\d+))?(?:_ld_(\d+)_(\d+)_(\d+))?"
    r"(?:_rw_([01]))?(?:_bias_(\w+))?"
)


def _asks_for(line: str) -> str | None:
    return None if line.startswith("Validator,") else ",".join(line.split(",", 2)[:2])


def _read(line: str) -> list[GemmConfig]:
    operation, _, params = (_asks_for(line) or "").partition(",")
    found = _OPERATION.fullmatch(operation)
    if found is None:
        raise UnsupportedLine(f"Tuna does not tune TunableOp's {operation[:80]}")
    if "*" in params:
        raise UnsupportedLine("Tuna does not tune products of sizes that vary (*)")
    parts = _PARAMS.fullmatch(params)
    if parts is None:
        raise BadInput(f"the sizes of TunableOp's row cannot be read: {params[:80]}")
    names = _NAME.findall(found[2])
    a, b, c = names if len(names) == 3 else names * 3 if len(names) == 1 else ("", "", "")
    unknown = [name for name in (a, b, c) if name not in _TYPES]
    if unknown:
        raise UnsupportedLine(f"Tuna has no type for TunableOp's {found[2][:80]}")
    m, n, k = (int(parts[place]) for place in (3, 4, 5))
    lda, ldb, ldc = (int(parts[place]) if parts[place] else None for place in (7, 8, 9))
    scale = "" if found[1] != "ScaledGemm" else "vector" if parts[10] == "1" else "tensor"
    first = Matrix(_TYPES[a], parts[1] != "n", lda, scale=scale)
    second = Matrix(_TYPES[b], parts[2] != "n", ldb, scale=scale)
    third = Matrix(_TYPES[c], leading=ldc)
    compute = "TF32" if "tf32" in names else None
    return [BlasProduct(m, n, k, first, second, third, int(parts[6] or 1), compute).config()]


def _left_out(line: str) -> Sequence[str]:
    biased = line.startswith("GemmAndBias") or re.search(r"_bias_(?!None)\w", line)
    return ["a bias"] if biased else []


LINE_FORM = LineForm(
    "row of a TunableOp file",
    recognises=lambda line: _ROW.match(line) is not None,
    read=_read,
    asks_for=_asks_for,
    left_out=_left_out,
)
