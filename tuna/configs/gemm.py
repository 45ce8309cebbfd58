"""Matrix multiplications, alone or in a strided batch: fields, checks, texts, driver commands."""

from __future__ import annotations

import re
from dataclasses import dataclass
from functools import cached_property
from reprlib import repr as shown
from typing import Any, ClassVar

from tuna.configs.config import Config
from tuna.configs.flags import Flags
from tuna.configs.kind import ConfigKind, similar_by
from tuna.configs.values import DATA_TYPES, MAX_COUNT, MAX_SIZE, DataType, check_sizes, member
from tuna.errors import BadInput

#: Commands by type of the inputs: MIOpenDriver itself has the first two; the others are Tuna's own
COMMANDS: dict[DataType, str] = {
    DataType.FP32: "gemm",
    DataType.FP16: "gemmfp16",
    DataType.BF16: "gemmbfp16",
    DataType.INT8: "gemmint8",
}
#: Types to which inputs may be rounded before they are multiplied
COMPUTE_TYPES = ("TF32", "BF16", "FP16")
_FIRST = ("m", "n", "k", "batch_count", "trans_a", "trans_b", "data_type")
LATER = (
    *("lda", "ldb", "ldc", "stride_a", "stride_b", "stride_c"),
    *("b_type", "c_type", "compute_type", "scale_a", "scale_b", "scale_c"),
)
_SIZES = ("m", "n", "k", "batch_count")
_INPUTS = {name: found for name, found in DATA_TYPES.items() if found is not DataType.INT32}
_WHOLE = (DataType.INT8, DataType.UINT8)
_SCALE = re.compile(r"(tensor|vector|block\d+(x\d+)?(_[a-z0-9]+)?|)")
_OF_COMMAND = {command: data_type for data_type, command in COMMANDS.items()}
#: MIOpenDriver's flags and defaults, as in gemm_driver.hpp, and MITuna's `--batchsize`
_FLAGS = Flags(
    numbers={
        **{"b": "batch_count", "-batchsize": "batch_count", "m": "a_h", "k": "a_w", "n": "b_w"},
        **{"u": "transA", "v": "transB", "C": "isColMajor"},
    },
    ignored={"F": "forw", "i": "iter", "V": "verify", "t": "time", "A": "alpha"},
    fixed={"B": ("beta", "0")},
)
_SWITCHES = ("transA", "transB", "isColMajor")
_DEFAULTS = {"batch_count": 1, "a_h": 256, "a_w": 256, "b_w": 256, **dict.fromkeys(_SWITCHES, 0)}


@dataclass(frozen=True)
class GemmConfig(Config):
    """`batch_count` products C = op(A) op(B) of row-major matrices.

    op(A) is m x k and op(B) is k x n. `trans_a` says that A is stored as k x m, `trans_b` that B is
    stored as n x k.

    `ld*` are the elements from one stored row to the next; None: the rows are packed. `stride_*`
    are the elements from one matrix of the batch to the next; None: they are packed, 0: all
    products share one. `data_type` is the type of A; `b_type` that of B, None: the same; `c_type`
    that of C, None: the same, or INT32 for INT8 and UINT8. `compute_type` is the type to which fp32
    inputs are rounded before they are multiplied; None: not rounded. `scale_*` are the factors of a
    matrix: "tensor": one, "vector": one for each row of op(A) or C or column of op(B),
    "block32_e8m0": one for each 32 elements of k, "block1x128": one for each block; empty: none.
    A value that equals the default is stored as None, so that equal layers are equal.
    """

    kind: ClassVar[str] = "gemm"
    later_fields: ClassVar[tuple[str, ...]] = LATER

    m: int
    n: int
    k: int
    batch_count: int = 1
    trans_a: bool = False
    trans_b: bool = False
    data_type: DataType = DataType.FP32
    lda: int | None = None
    ldb: int | None = None
    ldc: int | None = None
    stride_a: int | None = None
    stride_b: int | None = None
    stride_c: int | None = None
    b_type: DataType | None = None
    c_type: DataType | None = None
    compute_type: str | None = None
    scale_a: str = ""
    scale_b: str = ""
    scale_c: str = ""

    def __post_init__(self) -> None:
        if type(self.data_type) is not DataType or self.data_type is DataType.INT32:
            object.__setattr__(self, "data_type", member(_INPUTS, "data_type", self.data_type))
        check_sizes(_SIZES, (self.m, self.n, self.k, self.batch_count), 1)
        for name, value in (("trans_a", self.trans_a), ("trans_b", self.trans_b)):
            if type(value) is not bool:
                raise BadInput(f"{name} must be true or false, got {shown(value)}")
        if self.flops > MAX_COUNT:
            raise BadInput("the product is too large: its FLOPs do not fit in 63 bits")
        self._set_types()
        for letter, (rows, columns) in self.stored_shapes.items():
            self._set_strides(letter, rows, columns)
        for name in ("scale_a", "scale_b", "scale_c"):
            value = getattr(self, name)
            if type(value) is not str or len(value) > 32 or not _SCALE.fullmatch(value):
                raise BadInput(
                    f"{name} must be tensor, vector or a block such as block1x128, got"
                    f" {shown(value)}"
                )

    def _set_types(self) -> None:
        usual = DataType.INT32 if self.data_type in _WHOLE else self.data_type
        for name, members, default in (
            ("b_type", _INPUTS, self.data_type),
            ("c_type", DATA_TYPES, usual),
        ):
            value = getattr(self, name)
            if value is not None:
                found = member(members, name, value)
                object.__setattr__(self, name, None if found is default else found)
        if self.compute_type is None:
            return
        if self.compute_type not in COMPUTE_TYPES:
            raise BadInput(
                f"compute_type must be one of {', '.join(COMPUTE_TYPES)}, got"
                f" {shown(self.compute_type)}"
            )
        if self.data_type is not DataType.FP32:
            raise BadInput("only fp32 inputs have a compute_type")

    def _set_strides(self, letter: str, rows: int, columns: int) -> None:
        """Check a matrix's leading dimension and stride; those of packed matrices become None."""
        leading, stride = f"ld{letter}", f"stride_{letter}"
        given = getattr(self, leading)
        if given is not None:
            if type(given) is not int or not columns <= given <= MAX_SIZE:
                raise BadInput(
                    f"{leading} must be a whole number from {columns} (the row's length), got"
                    f" {shown(given)}"
                )
            if given == columns or rows == 1:
                object.__setattr__(self, leading, None)
        apart, lowest = getattr(self, stride), 1 if letter == "c" else 0
        if apart is not None:
            if type(apart) is not int or not lowest <= apart <= MAX_COUNT:
                raise BadInput(f"{stride} must be a whole number from {lowest}, got {shown(apart)}")
            if self.batch_count == 1 or apart == rows * (getattr(self, leading) or columns):
                object.__setattr__(self, stride, None)

    @classmethod
    def checked(cls, values: dict[str, Any]) -> GemmConfig:
        """The product with these values; raises BadInput."""
        return cls(**values)

    @property
    def stored_shapes(self) -> dict[str, tuple[int, int]]:
        """Rows and columns of A, B and C as they are stored."""
        m, n, k = self.m, self.n, self.k
        return {
            "a": (k, m) if self.trans_a else (m, k),
            "b": (n, k) if self.trans_b else (k, n),
            "c": (m, n),
        }

    @property
    def is_plain(self) -> bool:
        """True for packed matrices of one type that MIOpenDriver has, without scales."""
        return self.data_type in COMMANDS and len(self.stated_fields()) == len(_FIRST)

    @property
    def flops(self) -> int:
        """Floating-point operations, two for each multiply-add."""
        return 2 * self.batch_count * self.m * self.n * self.k

    @cached_property
    def _canonical(self) -> str:
        first = (
            f"kind={self.kind};m={self.m};n={self.n};k={self.k};batch_count={self.batch_count};"
            f"trans_a={int(self.trans_a)};trans_b={int(self.trans_b)};"
            f"data_type={self.data_type.value}"
        )
        return first + "".join(
            f";{name}={getattr(self, name)}" for name in self.stated_fields()[len(_FIRST) :]
        )

    def driver(self) -> str | None:
        """The MIOpenDriver command with long flags; None if a field has no flag."""
        if not self.is_plain:
            return None
        return (
            f"./bin/MIOpenDriver {COMMANDS[self.data_type]} --batch_count {self.batch_count}"
            f" --isColMajor 0 --a_h {self.m} --a_w {self.k} --b_w {self.n}"
            f" --transA {int(self.trans_a)} --transB {int(self.trans_b)}"
        )

    @property
    def label(self) -> str:
        """A short text such as `gemm b8 128x256x64 NT fp16`: m x n x k, N plain, T transposed."""
        batch = f"b{self.batch_count} " if self.batch_count != 1 else ""
        transposes = ("T" if self.trans_a else "N") + ("T" if self.trans_b else "N")
        words = [
            f"gemm {batch}{self.m}x{self.n}x{self.k} {transposes} {self.data_type.value.lower()}"
        ]
        words[0] += f"*{self.b_type.value.lower()}" if self.b_type else ""
        words[0] += f">{self.c_type.value.lower()}" if self.c_type else ""
        words += [self.compute_type.lower()] if self.compute_type else []
        for word, values in (
            ("ld", (self.lda, self.ldb, self.ldc)),
            ("stride", (self.stride_a, self.stride_b, self.stride_c)),
            ("scale", (self.scale_a or None, self.scale_b or None, self.scale_c or None)),
        ):
            if values != (None, None, None):
                words.append(
                    word + " " + ",".join("-" if value is None else str(value) for value in values)
                )
        return " ".join(words)


def _read(words: list[str]) -> list[GemmConfig]:
    """The product that a gemm command names; raises BadInput."""
    values = _FLAGS.read(words, _DEFAULTS)
    for name in _SWITCHES:
        if values[name] not in (0, 1):
            raise BadInput(f"--{name} must be 0 or 1, got {values[name]}")
    m, n, k, batch = (values[name] for name in ("a_h", "b_w", "a_w", "batch_count"))
    trans_a, trans_b = bool(values["transA"]), bool(values["transB"])
    if values["isColMajor"]:
        # The row-major product of the transposed matrices in the other order.
        m, n, trans_a, trans_b = n, m, trans_b, trans_a
    return [GemmConfig(m, n, k, batch, trans_a, trans_b, _OF_COMMAND[words[0]])]


KIND = ConfigKind(
    GemmConfig,
    commands=dict.fromkeys(_OF_COMMAND, _read),
    reference="tuna.libraries.reference:gemm",
    similar=similar_by(
        (
            *("trans_a", "trans_b", "data_type", "b_type", "c_type"),
            *("compute_type", "scale_a", "scale_b", "scale_c"),
        ),
        ("m", "n", "k", "batch_count"),
    ),
)
