"""Matrix products as column-major BLAS libraries name them, and as Tuna's row-major configs."""

from __future__ import annotations

from dataclasses import dataclass

from tuna.configs.driver import UnsupportedLine
from tuna.configs.gemm import GemmConfig
from tuna.configs.values import DataType


@dataclass(frozen=True)
class Matrix:
    """A column-major matrix of a BLAS call."""

    data_type: DataType
    transposed: bool = False
    leading: int | None = None  #: None: packed
    stride: int | None = None  #: from one matrix of a batch to the next; None: packed
    scale: str = ""


def row_major(
    m: int,
    n: int,
    k: int,
    batch_count: int,
    a: Matrix,
    b: Matrix,
    c: Matrix,
    compute_type: str | None = None,
) -> GemmConfig:
    """The config of C = op(A) op(B): row-major, it is the product of the transposed matrices in the
    other order.

    Raises BadInput for what a config cannot hold.
    """
    if min(m, n, k, batch_count) == 0:
        raise UnsupportedLine("Tuna does not tune products of empty matrices")
    # fmt: off
    return GemmConfig(n, m, k, batch_count, b.transposed, a.transposed, b.data_type, b.leading, a.leading, c.leading,
                      b.stride, a.stride, c.stride, a.data_type, c.data_type, compute_type, b.scale, a.scale, c.scale)
    # fmt: on
