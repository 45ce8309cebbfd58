"""Values that all kinds of config share: data types, directions and bounded whole numbers."""

from __future__ import annotations

from collections.abc import Mapping
from enum import Enum
from reprlib import repr as shown
from typing import TypeVar

from tuna.errors import BadInput

#: Maximum of a size: MIOpen keeps sizes in C ints
MAX_SIZE = 2**31 - 1
#: Maximum of element counts and FLOPs, which are stored as signed 64-bit integers
MAX_COUNT = 2**63 - 1


class DataType(str, Enum):
    """Type of a tensor, by MIOpen's name where it has one; a kind of layer allows some of them."""

    FP32 = "FP32"  #: IEEE single precision
    FP16 = "FP16"  #: IEEE half precision
    BF16 = "BF16"  #: bfloat16
    INT8 = "INT8"  #: signed bytes, accumulated in 32 bits
    UINT8 = "UINT8"  #: unsigned bytes, of a matrix product
    INT32 = "INT32"  #: 32-bit integers, only of the answer of a matrix product
    FP8_E4M3 = "FP8_E4M3"  #: OCP's 8 bits with 4 of exponent (PyTorch's float8_e4m3fn)
    FP8_E5M2 = "FP8_E5M2"  #: OCP's 8 bits with 5 of exponent
    FP8_E4M3FNUZ = "FP8_E4M3FNUZ"  #: FP8_E4M3 without negative zero, as on gfx942
    FP8_E5M2FNUZ = "FP8_E5M2FNUZ"  #: FP8_E5M2 without negative zero, as on gfx942

    __str__ = str.__str__


class Direction(str, Enum):
    """Which of a convolution's three operations is meant."""

    FORWARD = "F"  #: y from x and w
    BACKWARD_DATA = "B"  #: dx from dy and w
    BACKWARD_WEIGHTS = "W"  #: dw from x and dy

    __str__ = str.__str__


DATA_TYPES: dict[str, DataType] = {member.value: member for member in DataType}
DIRECTIONS: dict[str, Direction] = {member.value: member for member in Direction}

_E = TypeVar("_E", bound=Enum)
_ONLY_INT = {int}


def member(members: Mapping[str, _E], name: str, value: object) -> _E:
    """The enum member with the value `value`; raises BadInput that lists what is allowed."""
    try:
        return members[value]  # type: ignore[index]
    except (KeyError, TypeError):
        raise BadInput(f"{name} must be one of {', '.join(members)}, got {shown(value)}") from None


def check_sizes(names: tuple[str, ...], values: tuple[int, ...], minimum: int) -> None:
    """Raise BadInput unless every value is a whole number between `minimum` and 2^31-1."""
    if set(map(type, values)) == _ONLY_INT and min(values) >= minimum and max(values) <= MAX_SIZE:
        return
    for name, value in zip(names, values, strict=True):
        if type(value) is not int:
            raise BadInput(f"{name} must be a whole number, got {shown(value)}")
        if value < minimum:
            raise BadInput(f"{name} must be at least {minimum}, got {shown(value)}")
        if value > MAX_SIZE:
            raise BadInput(f"{name} must be at most {MAX_SIZE}, got {shown(value)}")
