"""The types in which a kernel reads, sums and writes."""

from __future__ import annotations

from dataclasses import dataclass

from tuna.configs.values import DataType


@dataclass(frozen=True)
class Types:
    """Types of a kernel's tensors, by NumPy's names.

    Sums of small values are taken by words of 32 bits: one instruction multiplies the values of a
    word of the input, which all lanes share, by those of each lane's weights, and adds the products
    to the lane's sum.
    """

    data_type: DataType  #: type of the layer
    input: str  #: type of the input, of a residual, and of the answer unless the epilogue says
    sums: str

    @property
    def real(self) -> str:
        """Type of real values beside the sums: fp32 beside those of bytes."""
        return "float32" if self.data_type is DataType.INT8 else self.input

    def resolved(self, name: str) -> str:
        """Return a type by NumPy's name, also if `name` is one of these fields."""
        return str(getattr(self, name, name))


#: What is added to signed bytes, so that the kernel reads unsigned ones
SIGN = 128
#: Number of values in a word of 32 bits by their type; empty: no words
WORDS = {"": 1, "bfloat16": 2, "int16": 2, "int8": 4}
#: Type of weights by that of the values of their words: where one word holds them all, nothing else
#: tells bytes from numbers of 16 bits
STORED = {"": "float32", "bfloat16": "int32", "int16": "uint32", "int8": "int32"}
FP32 = Types(DataType.FP32, "float32", "float32")
#: Products are exact in fp32, and sums are fp32
BF16 = Types(DataType.BF16, "bfloat16", "float32")
#: Signed inputs are stored with 128 added; sums are exact
INT8 = Types(DataType.INT8, "uint8", "int32")
#: Types by the layer's
TYPES = {types.data_type: types for types in (FP32, BF16, INT8)}
