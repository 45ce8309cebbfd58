"""Triton kernels of one's own, each at one shape: what `tuna tune kernel.py` tunes."""

from __future__ import annotations

import math
import re
from collections.abc import Mapping
from dataclasses import dataclass
from reprlib import repr as shown
from typing import Any, ClassVar, TypeAlias

from tuna.configs.config import Config
from tuna.configs.kind import ConfigKind, Similar
from tuna.errors import BadInput

#: A size or a mode of a shape, as JSON has it.
ShapeValue: TypeAlias = bool | int | float | str
_WORD = re.compile(r"[A-Za-z0-9_.+-]{1,64}")
_DIGEST = re.compile("[0-9a-f]{64}")
_LABEL_CHARS = 255


@dataclass(frozen=True)
class TritonKernelConfig(Config):
    """A kernel at a shape: what its file's functions get as a dictionary.

    The body is the file as far as it matters: the kernel, its axes, and the functions that give its
    arguments, its grid and the right answer.
    """

    kind: ClassVar[str] = "triton_kernel"
    body_field: ClassVar[str] = "body"

    function: str  #: the kernel's name
    shape: tuple[tuple[str, ShapeValue], ...]  #: (name, value) sorted by name
    body: str  #: SHA-256 of the file's text, in hex

    def __post_init__(self) -> None:
        for name in (self.function, *(name for name, _ in self.shape)):
            if not name.isidentifier() or not name.isascii() or len(name) > 64:
                raise BadInput(f"{shown(name)} is not a name of a kernel or of a size")
        object.__setattr__(self, "shape", tuple(sorted(self.shape, key=lambda pair: pair[0])))
        if not self.shape:
            raise BadInput("a shape has one size or more")
        for name, value in self.shape:
            _check_value(name, value)
        if not _DIGEST.fullmatch(self.body):
            raise BadInput("body must be a SHA-256 in 64 hex digits")
        if len(self.label) > _LABEL_CHARS:
            raise BadInput(
                f"the shape is too long: {self.label[:60]}... has {len(self.label)} characters,"
                f" more than {_LABEL_CHARS}"
            )

    def __eq__(self, other: object) -> bool:
        """True for the same JSON: 1 and true are equal in Python alone."""
        return isinstance(other, TritonKernelConfig) and self.canonical() == other.canonical()

    def __hash__(self) -> int:
        return hash(self.canonical())

    def to_json(self) -> dict[str, Any]:
        """`kind` and the fields, the shape as an object."""
        return {**super().to_json(), "shape": dict(self.shape)}

    @classmethod
    def checked(cls, values: dict[str, Any]) -> TritonKernelConfig:
        """The config with these JSON values; raises BadInput."""
        for name in ("function", "body"):
            if not isinstance(values[name], str):
                raise BadInput(f"{name} must be a text, got {shown(values[name])}")
        if not isinstance(values["shape"], Mapping):
            raise BadInput(f"shape must be an object of sizes, got {shown(values['shape'])}")
        return cls(**{**values, "shape": tuple(values["shape"].items())})

    @property
    def label(self) -> str:
        """A short text such as `softmax columns=1024 rows=4096`."""
        return " ".join([self.function, *(f"{name}={value}" for name, value in self.shape)])

    @property
    def flops(self) -> int:
        """0: what a kernel computes is not counted."""
        return 0


def _check_value(name: str, value: object) -> None:
    """Raise BadInput unless it is a number, a word, true or false."""
    if isinstance(value, str):
        if not _WORD.fullmatch(value):
            raise BadInput(f"{name} must be a word of letters and digits, got {shown(value)}")
    elif isinstance(value, int):
        if not -(2**63) <= value < 2**63:
            raise BadInput(f"{name} does not fit in 64 bits: {shown(value)}")
    elif not isinstance(value, float) or not math.isfinite(value):
        raise BadInput(f"{name} must be a number, a word, true or false, got {shown(value)}")


def _similar(config: TritonKernelConfig) -> Similar:
    """Return the likeness to shapes of the kernel that differ in numbers alone, none of which is
    known to be a batch's size."""
    sizes = {name: float(value) for name, value in config.shape if _is_size(value)}
    modes = (pair for pair in config.shape if pair[0] not in sizes)
    family = (config.function, config.body, *sizes, *modes)
    return Similar(family, tuple(sizes.values()), batch_first=False)


def _is_size(value: ShapeValue) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool) and value > 0


KIND = ConfigKind(TritonKernelConfig, similar=_similar)
