"""Whole models, built with kernels that were chosen for them: what the latency of a model is a
result for."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

from tuna.configs.config import Config
from tuna.configs.kind import ConfigKind
from tuna.errors import BadInput

#: Maximum error of a model's answer, relative to the largest magnitude of each output; and the
#: absolute error beside it, because a sigmoid far below 0 is exact to fewer digits
TOLERANCE, SMALL = 1e-3, 1e-3
#: The same of a model in bf16: its values have 8 bits, its sums are fp32
BF16_TOLERANCE = 1e-2


@dataclass(frozen=True)
class WholeModelConfig(Config):
    """An imported model with the kernels that were chosen for its tasks, for one target.

    The body has the functions that are to be compiled. What calls them, with the weights, is the
    `program` for TVM's virtual machine, which only the device needs.
    """

    kind: ClassVar[str] = "model"
    body_field: ClassVar[str] = "body"
    data_fields: ClassVar[tuple[str, ...]] = ("program", "answers")

    name: str  #: name of the import, with the first digits of its version
    target: str  #: JSON of the target that it was planned for
    body: str  #: SHA-256 of the functions
    program: str  #: SHA-256 of the program with the weights
    answers: str  #: SHA-256 of inputs and the right answers to them
    operations: int = 0  #: number of operations of its convolutions and products

    def __post_init__(self) -> None:
        if not (self.name and self.target and self.body and self.program and self.answers):
            raise BadInput("a model has a name, a target, a body, a program and answers")

    @property
    def label(self) -> str:
        """Return a short text such as `model resnet18@b5e6e80f35c4 3fa2c1d0`."""
        return f"model {self.name[:200]} {self.body[:8]}"

    @property
    def flops(self) -> int:
        """The operations of its convolutions and products."""
        return self.operations


KIND = ConfigKind(WholeModelConfig)
