"""A kind of config as somebody else would bring it: softmax, without a driver grammar, with a
reference."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

import numpy as np

from tuna.configs import Config, ConfigKind, DataType
from tuna.libraries.reference import Problem, np_type, random


@dataclass(frozen=True)
class Softmax(Config):
    """Softmax over the last axis of `rows` x `cols` numbers."""

    kind: ClassVar[str] = "softmax"

    rows: int
    cols: int
    data_type: DataType = DataType.FP32

    def __post_init__(self) -> None:
        if min(self.rows, self.cols) < 1:
            raise ValueError("rows and cols must be at least 1")

    @property
    def label(self) -> str:
        return f"softmax {self.rows}x{self.cols} {self.data_type.lower()}"

    @property
    def flops(self) -> int:
        return 4 * self.rows * self.cols  # subtract the largest, exp, sum, divide


def problem(config: Softmax, seed: int) -> Problem:
    """x and softmax(x)."""
    name = {DataType.FP32: "float32", DataType.FP16: "float16"}[config.data_type]
    x = random(np.random.default_rng(seed), (config.rows, config.cols), name)
    powers = np.exp(x.astype(np.float64) - x.max(axis=-1, keepdims=True))
    return Problem((x,), powers / powers.sum(axis=-1, keepdims=True), str(np_type(name)), 2e-3)


KIND = ConfigKind(Softmax, reference="softmax_kind:problem")
