"""Fused mixtures of experts: the two grouped matrix products of a layer of a language model."""

from __future__ import annotations

from dataclasses import dataclass
from reprlib import repr as shown
from typing import Any, ClassVar

from tuna.configs.config import Config
from tuna.configs.kind import ConfigKind, similar_by
from tuna.configs.values import DATA_TYPES, MAX_COUNT, DataType, check_sizes, member
from tuna.errors import BadInput

FP8, INT8 = "fp8_w8a8", "int8_w8a16"
#: Quantisation of weights and activations, by the names that vLLM and SGLang use; empty: none.
SCHEMES = ("", FP8, INT8)
_SIZES = ("tokens", "experts", "intermediate", "hidden", "topk")


@dataclass(frozen=True)
class MoeConfig(Config):
    """Each token goes to `topk` experts: the product with an expert's first matrix (gate and up,
    2 `intermediate` x `hidden`), an activation, and that with its second (`hidden` x
    `intermediate`).

    `intermediate` is that of one rank, as tensor parallelism leaves it: the N in the names of
    vLLM's and SGLang's files. With `block_n` and `block_k` weights have a scale for each such block
    and activations one for each `block_k` values of a token; both 0: one for each expert.
    """

    kind: ClassVar[str] = "moe"

    tokens: int
    experts: int
    intermediate: int
    hidden: int
    topk: int
    data_type: DataType = DataType.BF16  #: type of the answer and of all that is not quantised
    scheme: str = ""
    block_n: int = 0
    block_k: int = 0

    def __post_init__(self) -> None:
        if type(self.data_type) is not DataType:
            object.__setattr__(self, "data_type", member(DATA_TYPES, "data_type", self.data_type))
        if self.data_type not in (DataType.BF16, DataType.FP16):
            raise BadInput(f"a moe has the data_type BF16 or FP16, got {self.data_type}")
        check_sizes(_SIZES, tuple(getattr(self, name) for name in _SIZES), 1)
        check_sizes(("block_n", "block_k"), (self.block_n, self.block_k), 0)
        if self.scheme not in SCHEMES:
            raise BadInput(f"scheme must be {FP8}, {INT8} or empty, got {shown(self.scheme)}")
        if self.topk > self.experts:
            raise BadInput(f"topk is at most the number of experts, got {self.topk}")
        if bool(self.block_n) != bool(self.block_k) or (self.block_n and self.scheme != FP8):
            raise BadInput(f"block_n and block_k are given together, with the scheme {FP8}")
        if self.flops > MAX_COUNT:
            raise BadInput("the layer is too large: its FLOPs do not fit in 63 bits")

    @classmethod
    def checked(cls, values: dict[str, Any]) -> MoeConfig:
        """The layer with these values; raises BadInput."""
        return cls(**values)

    @property
    def label(self) -> str:
        """A short text such as `moe 64 tokens E512 N128 K2048 top10 bf16 fp8_w8a8 128x128`."""
        words = [f"moe {self.tokens} tokens E{self.experts} N{self.intermediate} K{self.hidden}"]
        words += [f"top{self.topk}", self.data_type.value.lower(), self.scheme]
        words += [f"{self.block_n}x{self.block_k}" if self.block_n else ""]
        return " ".join(filter(None, words))

    @property
    def product_type(self) -> DataType:
        """The type in which matrices are multiplied: with weights alone in 8 bits, that of the
        activations."""
        return DataType.FP8_E4M3 if self.scheme == FP8 else self.data_type

    @property
    def flops(self) -> int:
        """Two for each multiply-add of both products."""
        return 6 * self.tokens * self.topk * self.hidden * self.intermediate


KIND = ConfigKind(
    MoeConfig, similar=similar_by(("data_type", "scheme", "block_n", "block_k"), _SIZES)
)
