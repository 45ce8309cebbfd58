"""Matrix products as column-major BLAS libraries name them, and as Tuna's row-major configs."""

from __future__ import annotations

from dataclasses import dataclass

from tuna.configs.gemm import GemmConfig
from tuna.configs.lines import UnsupportedLine
from tuna.configs.values import DataType


@dataclass(frozen=True)
class Matrix:
    """A column-major matrix of a BLAS call."""

    data_type: DataType
    transposed: bool = False
    leading: int | None = None  #: None: packed
    stride: int | None = None  #: from one matrix of a batch to the next; None: packed
    scale: str = ""


@dataclass(frozen=True)
class BlasProduct:
    """C = op(A) op(B) of column-major matrices."""

    m: int
    n: int
    k: int
    a: Matrix
    b: Matrix
    c: Matrix
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
