"""The kind: softmax of each row of a matrix."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

from tuna.configs import Config, ConfigKind


@dataclass(frozen=True)
class Softmax(Config):
    """`rows` x `cols` of fp32, each row by itself."""

    kind: ClassVar[str] = "softmax"

    rows: int
    cols: int

    @property
    def label(self) -> str:
        """Such as `softmax 64x100`."""
        return f"softmax {self.rows}x{self.cols}"

    @property
    def flops(self) -> int:
        """Exponential, sum, division."""
        return 3 * self.rows * self.cols


KIND = ConfigKind(Softmax, reference="tuna_softmax.reference:problem")
