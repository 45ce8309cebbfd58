"""The matrices of Winograd's minimal convolutions F(m, r), exact, by Cook and Toom's construction.

An output of m values from a filter of r values needs a = m + r - 1 products:

    y = AT [ (G g) * (BT d) ]          AT: m x a    G: a x r    BT: a x a

They come from polynomial interpolation at a - 1 points and infinity (S. Winograd, "Arithmetic
Complexity of Computations", 1980; A. Lavin and S. Gray, "Fast Algorithms for Convolutional Neural
Networks", 2015). The points are 0 and pairs +p, -p, for which rows differ in the signs of odd terms
only: half of the work of a transform is shared.
"""

from __future__ import annotations

import functools
from dataclasses import dataclass
from fractions import Fraction

Matrix = tuple[tuple[Fraction, ...], ...]

#: Interpolation points, as many as a size needs. Points near 1 lose the fewest digits: of F(4, 3),
#: 3/4 and 3/2 have a quarter of the error of 1 and 2 at the same time (measured, AVX-512 and AVX2),
#: and their powers are exact in fp32; of F(6, 3), no other three pairs were clearly better.
_FEW = tuple(Fraction(text) for text in ("0", "1", "-1"))
_FIVE = tuple(Fraction(text) for text in ("0", "3/4", "-3/4", "3/2", "-3/2"))
_MANY = tuple(Fraction(text) for text in ("0", "1", "-1", "2", "-2", "1/2", "-1/2"))


@dataclass(frozen=True)
class Transforms:
    """The three matrices of F(m, r)."""

    output: Matrix  #: matrix AT, m x a
    filter: Matrix  #: matrix G, a x r
    input: Matrix  #: matrix BT, a x a


@functools.cache
def transforms(outputs: int, taps: int) -> Transforms:
    """The matrices for `outputs` values and a filter of `taps`; raises ValueError if there are too
    few points."""
    size = outputs + taps - 1
    if not 1 <= size - 1 <= len(_MANY):
        raise ValueError(f"F({outputs}, {taps}) needs {size - 1} points; there are {len(_MANY)}")
    points = next(points[: size - 1] for points in (_FEW, _FIVE, _MANY) if size - 1 <= len(points))
    zero, unit = Fraction(0), Fraction(1)
    at = [
        [point**row for point in points] + [unit if row == outputs - 1 else zero]
        for row in range(outputs)
    ]
    g, bt = [], []
    for point in points:
        others = [other for other in points if other != point]
        scale = unit
        for other in others:
            scale *= point - other
        g.append([point**tap / scale for tap in range(taps)])
        bt.append([*_polynomial(others), zero])
    g.append([zero] * (taps - 1) + [unit])
    bt.append(_polynomial(points))
    return Transforms(_frozen(at), _frozen(g), _frozen(bt))


def _polynomial(roots: tuple[Fraction, ...] | list[Fraction]) -> list[Fraction]:
    """Coefficients of the product of (x - root), the constant first."""
    found = [Fraction(1)]
    for root in roots:
        shifted = [Fraction(0), *found]
        found = [
            high - root * low for high, low in zip(shifted, [*found, Fraction(0)], strict=True)
        ]
    return found


def _frozen(rows: list[list[Fraction]]) -> Matrix:
    return tuple(tuple(row) for row in rows)
