"""The types in which a kernel reads, sums and writes."""

from __future__ import annotations

from dataclasses import dataclass

from tuna.configs.values import DataType


@dataclass(frozen=True)
class Types:
    """Types of a kernel's tensors, by NumPy's names."""

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
FP32 = Types(DataType.FP32, "float32", "float32")
#: Products are exact in fp32, and sums are fp32
BF16 = Types(DataType.BF16, "bfloat16", "float32")
#: Signed inputs are stored with 128 added; sums are exact
INT8 = Types(DataType.INT8, "uint8", "int32")
#: Types by the layer's
TYPES = {types.data_type: types for types in (FP32, BF16, INT8)}
