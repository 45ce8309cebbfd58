"""The axes of a tensor as letters, followed through reshapes and transpositions. Imports TVM.

An axis is the list of its parts, outer ones first: batch and heads may share one, and one of all
heads may be two, of groups and of the heads in a group.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import NamedTuple

from tuna_models.compiler.graph import RESHAPES, Node, extents


class Part(NamedTuple):
    """Some values of a letter's axis."""

    letter: str
    extent: int
    stride: int = 1  #: number of values of the letter from one of these to the next


Axis = list[Part]


def named(shape: Sequence[int], letters: str) -> list[Axis]:
    """The axes of a tensor of this shape by their letters, of the last ones; others before them are
    `_`."""
    padded = letters.rjust(len(shape), "_")
    return [
        axis_of(letter, extent)
        for letter, extent in zip(padded[len(padded) - len(shape) :], shape, strict=True)
    ]


def axis_of(letter: str, extent: int) -> Axis:
    """An axis of one letter; one of a single value has no parts."""
    return [Part(letter, extent)] if extent > 1 else []


def reshaped(axes: Sequence[Axis], shape: Sequence[int]) -> list[Axis] | None:
    """The axes of the same values in another shape; None where an axis would have parts of
    another."""
    parts = [part for axis in axes for part in axis][::-1]
    found = []
    for extent in shape:
        axis, missing = Axis(), extent
        while missing > 1:
            letter, size, stride = parts.pop()
            common = math.gcd(size, missing)
            if common == 1 or (common < size and common < missing):
                return None
            if common < size:
                parts.append(Part(letter, size // common, stride))
            axis.append(Part(letter, common, stride * (size // common)))
            missing //= common
        found.append(axis)
    return found


def moved(node: Node, axes: Sequence[Axis], *, back: bool = False) -> list[Axis] | None:
    """The axes of an operator's value from those of what it moves, or `back` to them; None for
    other operators than reshapes and transpositions."""
    source, shape = extents(node.args[0]) if node.args else None, extents(node.var)
    if source is None or shape is None:
        return None
    if node.op == "permute_dims":
        given = node.attrs.axes
        order = [int(axis) for axis in given or range(len(source))[::-1]]
        if back:
            order = [order.index(axis) for axis in range(len(order))]
        return [axes[axis] for axis in order]
    if node.op in RESHAPES:
        return reshaped(axes, source if back else shape)
    return None


def merged(parts: Sequence[Part]) -> list[Part] | None:
    """The parts of each letter as one; None where they lie in several places, or inner ones are
    missing."""
    found = list[Part]()
    for part in parts:
        before = found[-1] if found else None
        if before and before.letter == part.letter:
            if before.stride != part.extent * part.stride:
                return None
            found[-1] = Part(part.letter, before.extent * part.extent, part.stride)
        else:
            found.append(part)
    letters = {part.letter for part in found}
    whole = len(letters) == len(found) and all(part.stride == 1 for part in found)
    return found if whole else None


def layout(axes: Sequence[Axis], letters: str) -> str | None:
    """The order of the letters in a tensor's values, of those with an extent of 1 at the beginning
    or where `letters` has them; None where the values of one lie in several places."""
    parts = merged([part for axis in axes for part in axis])
    if parts is None or not {part.letter for part in parts} <= set(letters):
        return None
    found = "".join(part.letter for part in parts)
    if found == "".join(letter for letter in letters if letter in found):
        return letters
    return "".join(letter for letter in letters if letter not in found) + found


def without(
    axes: Sequence[Axis], shape: Sequence[int], letter: str
) -> tuple[list[Axis], int] | None:
    """The axes of what becomes these by being repeated from `shape`, and how often the innermost
    values of `letter` are repeated; None where others are."""
    times, found = 1, []
    for axis, extent in zip(axes, [1] * (len(axes) - len(shape)) + [*shape], strict=True):
        own = math.prod(part.extent for part in axis)
        if own == extent:
            found.append(axis)
            continue
        if extent != 1 or len(axis) != 1 or axis[0].letter != letter or axis[0].stride != 1:
            return None
        times = own
        found.append([])
    kept = [
        [
            part._replace(stride=part.stride // times) if part.letter == letter else part
            for part in axis
        ]
        for axis in found
    ]
    return kept, times
