"""A matrix multiplication, alone or in a strided batch: its sizes, its canonical text and its key."""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property
from reprlib import repr as shown
from typing import Any, ClassVar

from tuna.configs.config import Config
from tuna.configs.values import DATA_TYPES, MAX_COUNT, DataType, check_sizes, member
from tuna.errors import BadInput

#: MIOpenDriver itself has the first two; the others are Tuna's own in the same style.
COMMANDS: dict[DataType, str] = {
    DataType.FP32: "gemm",
    DataType.FP16: "gemmfp16",
    DataType.BF16: "gemmbfp16",
    DataType.INT8: "gemmint8",
}
#: Every field, in the order of `to_json`.
FIELDS = ("m", "n", "k", "batch_count", "trans_a", "trans_b", "data_type")
_SIZES = ("m", "n", "k", "batch_count")


@dataclass(frozen=True)
class GemmConfig(Config):
    """`batch_count` products C = op(A) op(B) of row-major, packed matrices.

    op(A) is m x k and op(B) is k x n. `trans_a` says that A is stored as k x m, `trans_b` that B is stored as n x k.
    """

    kind: ClassVar[str] = "gemm"
    json_fields: ClassVar[tuple[str, ...]] = FIELDS

    m: int
    n: int
    k: int
    batch_count: int = 1
    trans_a: bool = False
    trans_b: bool = False
    data_type: DataType = DataType.FP32

    def __post_init__(self) -> None:
        if type(self.data_type) is not DataType:
            object.__setattr__(self, "data_type", member(DATA_TYPES, "data_type", self.data_type))
        check_sizes(_SIZES, (self.m, self.n, self.k, self.batch_count), 1)
        for name, value in (("trans_a", self.trans_a), ("trans_b", self.trans_b)):
            if type(value) is not bool:
                raise BadInput(f"{name} must be true or false, got {shown(value)}")
        if self.flops > MAX_COUNT:
            raise BadInput("the product is too large: its FLOPs do not fit in 63 bits")

    @classmethod
    def checked(cls, values: dict[str, Any]) -> GemmConfig:
        """The product with these values; raises BadInput."""
        return cls(**values)

    @property
    def flops(self) -> int:
        """Floating-point operations, two for each multiply-add."""
        return 2 * self.batch_count * self.m * self.n * self.k

    @cached_property
    def _canonical(self) -> str:
        # fmt: off
        return (f"kind={self.kind};m={self.m};n={self.n};k={self.k};batch_count={self.batch_count};"
                f"trans_a={int(self.trans_a)};trans_b={int(self.trans_b)};data_type={self.data_type.value}")
        # fmt: on

    def driver(self) -> str:
        """The MIOpenDriver command of the product, with every flag in its long form."""
        # fmt: off
        return (f"./bin/MIOpenDriver {COMMANDS[self.data_type]} --batch_count {self.batch_count} --isColMajor 0 "
                f"--a_h {self.m} --a_w {self.k} --b_w {self.n} "
                f"--transA {int(self.trans_a)} --transB {int(self.trans_b)}")
        # fmt: on

    @property
    def label(self) -> str:
        """A short text for people, such as `gemm b8 128x256x64 NT fp16` (m x n x k; N plain, T transposed)."""
        batch = f"b{self.batch_count} " if self.batch_count != 1 else ""
        transposes = ("T" if self.trans_a else "N") + ("T" if self.trans_b else "N")
        return f"gemm {batch}{self.m}x{self.n}x{self.k} {transposes} {self.data_type.value.lower()}"
