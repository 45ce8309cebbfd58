"""The types of a layer's tensors, by NumPy's and TVM's names."""

from __future__ import annotations

from tuna.configs.values import DataType

#: By config's data type: of the inputs, of the answer, and what sums are kept in. INT8 answers in
#: 32 bits, as MIOpen's int8 convolutions do; the others answer in their own type after one
#: rounding.
DTYPES: dict[DataType, tuple[str, str, str]] = {
    DataType.FP32: ("float32", "float32", "float32"),
    DataType.FP16: ("float16", "float16", "float32"),
    DataType.BF16: ("bfloat16", "bfloat16", "float32"),
    DataType.INT8: ("int8", "int32", "int32"),
}
