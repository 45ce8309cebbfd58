"""Arguments of a model as `NAME=SHAPE:TYPE`, and values of open extents. Imports no TVM."""

from __future__ import annotations

import itertools
import math
import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from tuna.errors import BadInput

#: The type of an argument that is a shape itself, not a tensor.
SHAPE = "shape"
#: Types of tensors, by NumPy's names.
TYPES = (
    *("float16", "float32", "float64", "bool"),
    *("int8", "int16", "int32", "int64", "uint8", "uint16", "uint32", "uint64"),
)
_NAME = re.compile(r"[A-Za-z_][\w/:-]*(?:\.\d{1,4}){0,16}")
_OPEN = re.compile(r"[A-Za-z_]\w*")
_MOST_EXTENTS = 16
#: Points of a sweep.
_MOST_POINTS = 1000


@dataclass(frozen=True)
class Argument:
    """A tensor or shape that a model takes: an argument, or a part of one that is a tuple."""

    name: str  #: of the model's parameter
    place: tuple[int, ...]  #: in tuples, from the outermost; empty: the argument itself
    extents: tuple[int | str, ...]  #: a text is the name of an open extent
    type: str
    bounds: tuple[int, int] | None = None  #: smallest and largest value to draw; None: any
    label: str = ""  #: its name in a file of inputs, where the model's parameter has another

    def __str__(self) -> str:
        name = ".".join((self.name, *map(str, self.place)))
        return f"{name}={','.join(map(str, self.extents))}:{self.type}"

    def shape(self, values: Mapping[str, int]) -> list[int]:
        """The extents with these values of the open ones."""
        return [values[extent] if isinstance(extent, str) else extent for extent in self.extents]


def parse(text: str) -> Argument:
    """Parse `x=1,3,224,224:float32`, `x=n,128:int64` or `s=n,4:shape`; raises BadInput.

    `p.0=2,3:float32` is the first part of the tuple p.
    """
    left, mark, kind = text.rpartition(":")
    name, equals, extents = left.partition("=")
    if not mark or not equals or not _NAME.fullmatch(name):
        raise BadInput(
            f"{text!r} is not of the form NAME=SHAPE:TYPE, such as x=1,3,224,224:float32."
        )
    if kind not in (*TYPES, SHAPE):
        raise BadInput(
            f"The input {name} has the unknown type {kind!r}.",
            hint=f"types: {', '.join((*TYPES, SHAPE))}",
        )
    first, *numbers = name.split(".")
    return Argument(first, tuple(map(int, numbers)), tuple(_extents(name, extents)), kind)


def _extents(name: str, text: str) -> Iterator[int | str]:
    words = [word.strip() for word in text.split(",")] if text.strip() else []
    if len(words) > _MOST_EXTENTS:
        raise BadInput(f"The input {name} has more than {_MOST_EXTENTS} extents.")
    for word in words:
        if word.isdecimal() and len(word) < 16:
            yield int(word)
        elif _OPEN.fullmatch(word):
            yield word
        else:
            raise BadInput(
                f"The input {name} has the extent {word!r}; it is a number, or the name of an open"
                " extent."
            )


def sweep(arguments: Sequence[Argument], texts: Sequence[str]) -> list[dict[str, int]]:
    """Return every combination of values in texts such as `n=1,4,8`; without texts an empty one.

    Texts for the same extent add up.

    Raises BadInput for an open extent without values, and for values of an extent that no argument
    has.
    """
    found: dict[str, list[int]] = {}
    for text in texts:
        name, mark, numbers = text.partition("=")
        words = numbers.split(",")
        if not mark or not all(
            re.fullmatch("[0-9]{1,10}", word) and 0 < int(word) < 1 << 31 for word in words
        ):
            raise BadInput(f"{text!r} is not of the form n=1,4,8.")
        found.setdefault(name, []).extend(map(int, words))
    named = {
        extent for argument in arguments for extent in argument.extents if isinstance(extent, str)
    }
    if missing := sorted(named - found.keys()):
        raise BadInput(
            f"The extent {missing[0]} has no value.", hint=f"give it some: --shape {missing[0]}=1,8"
        )
    if unused := sorted(found.keys() - named):
        raise BadInput(
            f"No input has the open extent {unused[0]}.",
            hint=f"open extents: {', '.join(named) or 'none'}",
        )
    count = math.prod(map(len, found.values()))
    if count > _MOST_POINTS:
        raise BadInput(
            f"These are {count} combinations; at most {_MOST_POINTS} can be timed at once."
        )
    return [dict(zip(found, values, strict=True)) for values in itertools.product(*found.values())]


def tree(arguments: Sequence[Argument], values: Mapping[str, int]) -> dict[str, Any]:
    """Return `[type, shape, bounds, label]` by parameter, or a list of such in `{"tuple": [...]}`.

    Raises BadInput for a gap in a tuple.
    """
    by_name: dict[str, list[Argument]] = {}
    for argument in arguments:
        by_name.setdefault(argument.name, []).append(argument)
    return {name: _node(name, parts, 0, values) for name, parts in by_name.items()}


def _node(name: str, parts: Sequence[Argument], depth: int, values: Mapping[str, int]) -> Any:
    if len(parts) == 1 and len(parts[0].place) == depth:
        return [parts[0].type, parts[0].shape(values), parts[0].bounds, parts[0].label or name]
    numbers = sorted({part.place[depth] for part in parts if len(part.place) > depth})
    if len(parts) != sum(len(part.place) > depth for part in parts) or numbers != list(
        range(len(numbers))
    ):
        raise BadInput(
            f"The input {name} is not one tensor, nor a tuple with all of its parts {name}.0,"
            f" {name}.1 ...."
        )
    inner = [[part for part in parts if part.place[depth] == number] for number in numbers]
    return {
        "tuple": [
            _node(f"{name}.{number}", found, depth + 1, values)
            for number, found in enumerate(inner)
        ]
    }
