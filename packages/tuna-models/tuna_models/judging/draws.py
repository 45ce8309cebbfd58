"""Inputs beside random ones, on which faults show that random ones pass by: of one value, almost
all zero, halfway between whole numbers, at the ends of their types and tables. Imports onnx.

What an input is for follows from the operators that read it, and what is made of it
(`onnx_graph.py`). Infinities go where no arithmetic but ordering reads them, whole numbers of the
whole type where only whole numbers are computed from them, positions of several thousands where
they become real, and rows of a mask are hidden whole.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

import numpy as np

from tuna_models.judging.inputs import is_real
from tuna_models.reading.onnx_graph import OnnxGraph

#: Largest position that is drawn where no table and no bound limits it.
POSITIONS = 4095
#: How much larger than normal ones real values are drawn, and in fp16, whose squares end at 256.
_LARGE, _LARGE_HALF = 64.0, 256.0
#: Value of a tensor of one value; its products with powers of two are exact.
_LEVEL = 1.5

Arrays = dict[str, Any]
Inputs = Sequence[Mapping[str, Any]]


def silent(graph: OnnxGraph | None, inputs: Inputs, values: Mapping[str, Any]) -> Arrays:
    """Real values that are zero, bytes that stand for zero, and whole numbers at their least."""
    return _each(inputs, values, lambda one, array: np.full_like(array, _zero(graph, one, array)))


def lowest(graph: OnnxGraph | None, inputs: Inputs, values: Mapping[str, Any]) -> Arrays:
    """Tensors of one value below zero: the least one of its type where no sum reads it."""
    return _each(inputs, values, lambda one, array: _level(graph, one, array, -1))


def highest(graph: OnnxGraph | None, inputs: Inputs, values: Mapping[str, Any]) -> Arrays:
    """Tensors of one value above zero, in the same way."""
    return _each(inputs, values, lambda one, array: _level(graph, one, array, 1))


def sparse(graph: OnnxGraph | None, inputs: Inputs, values: Mapping[str, Any]) -> Arrays:
    """Rows of zeros but for one value, in bytes one step from that of zero."""

    def row(one: Mapping[str, Any], array: Any) -> Any:
        if not array.ndim or not array.size or not (is_real(array) or _is_bytes(one, array)):
            return array
        zero = _zero(graph, one, array)
        found = np.full_like(array, zero)
        lines, given = found.reshape(-1, array.shape[-1]), array.reshape(-1, array.shape[-1])
        rows = np.arange(len(lines))
        places = (rows * 7 + 5) % array.shape[-1]
        beside = zero + 1 if zero < np.iinfo(np.int8).max else zero - 1
        lines[rows, places] = given[rows, places] if is_real(array) else beside
        return found

    return _each(inputs, values, row)


def halfway(graph: OnnxGraph, inputs: Inputs, values: Mapping[str, Any]) -> Arrays:
    """Real values in the middle between whole numbers, or the steps that they are rounded to."""

    def half(one: Mapping[str, Any], array: Any) -> Any:
        step = graph.step(one["name"])
        if step is None or not is_real(array):
            return array
        return (np.floor(array * 4) + 0.5).astype(array.dtype) * array.dtype.type(step)

    return _each(inputs, values, half)


def scaled(inputs: Inputs, values: Mapping[str, Any], factor: float | None = None) -> Arrays:
    """Real values so many times larger; by default as large as shows where sums of exponentials
    and squares end."""

    def times(_: Mapping[str, Any], array: Any) -> Any:
        if not is_real(array):
            return array
        by = factor or (_LARGE_HALF if array.dtype == np.float16 else _LARGE)
        with np.errstate(over="ignore"):
            return np.asarray(array * by, array.dtype)

    return _each(inputs, values, times)


def ends(graph: OnnxGraph | None, inputs: Inputs, values: Mapping[str, Any]) -> Arrays:
    """Values at both ends of their types, bounds and tables, from whose end negative indices count;
    positions up to several thousands."""
    generator = np.random.default_rng(0)

    def end(one: Mapping[str, Any], array: Any) -> Any:
        choices = _ends(graph, one, array)
        if choices is None:
            return array
        found = generator.choice(np.asarray(choices, array.dtype), array.shape)
        if is_real(array):
            found = _with_rows(np.where(generator.random(array.shape) < 0.5, array, found))
        return np.asarray(found, array.dtype)

    found = _each(inputs, values, end)
    if graph is not None:
        for one in inputs:
            if one.get("bounds") is None and graph.is_position(one["name"]):
                found[one["name"]] = _positions(values[one["name"]])
    return found


def hidden(graph: OnnxGraph, inputs: Inputs, values: Mapping[str, Any]) -> Arrays:
    """Masks of truth values and whole numbers with the last row of zeros, and where there are more
    than two the one before of ones; masks that are added with the least number in their place."""

    def rows(one: Mapping[str, Any], array: Any) -> Any:
        kind = graph.mask(one, array)
        if not kind or not array.ndim or not array.size:
            return array
        generator = np.random.default_rng(0)
        found = generator.integers(0, 2, array.shape, dtype=np.uint8)
        lines = found.reshape(-1, array.shape[-1])
        lines[:, 0] = 1
        lines[-1] = 0
        if len(lines) > 2:
            lines[-2] = 1
        if kind == "added":
            return np.where(found == 1, 0, np.finfo(array.dtype).min).astype(array.dtype)
        return found.astype(array.dtype)

    return _each(inputs, values, rows)


def moved(values: Mapping[str, Any], part: float) -> Arrays:
    """Real values moved by this part of themselves at most, at random, but for those of masks."""
    generator = np.random.default_rng(1)

    def beside(array: Any) -> Any:
        near = np.asarray(array * (1 + part * generator.uniform(-1, 1, array.shape)), array.dtype)
        return np.where(np.abs(array) < np.finfo(array.dtype).max / 2, near, array)

    return {name: beside(array) if is_real(array) else array for name, array in values.items()}


def differing(
    sets: Iterator[tuple[str, Arrays]], values: Mapping[str, Any]
) -> Iterator[tuple[str, Arrays]]:
    """Yield the titles and inputs that are not those of another set."""
    known: list[Mapping[str, Any]] = [values]
    for title, arrays in sets:
        if not any(_same(arrays, others) for others in known):
            known.append(arrays)
            yield title, arrays


def _same(one: Mapping[str, Any], other: Mapping[str, Any]) -> bool:
    return all(np.array_equal(one[name], other[name], equal_nan=False) for name in one)


def _each(inputs: Inputs, values: Mapping[str, Any], draw: Callable[[Any, Any], Any]) -> Arrays:
    return {one["name"]: draw(one, values[one["name"]]) for one in inputs}


def _positions(array: Any) -> Any:
    """Rows of positions one behind the other, the first of which ends at the last position."""
    whole = np.arange(array.size, dtype=np.int64).reshape(array.shape)
    lines = whole.reshape(-1, array.shape[-1]) if array.ndim else whole.reshape(1, 1)
    lines[:] = POSITIONS + 1 - lines.shape[1] + np.arange(lines.shape[1])
    lines -= 97 * np.arange(len(lines))[:, None]
    return np.abs(lines).reshape(array.shape).astype(array.dtype)


def _is_bytes(one: Mapping[str, Any], array: Any) -> bool:
    """Whether they are quantised values."""
    whole = array.dtype.kind in "iu" and array.dtype.itemsize == 1
    return bool(whole and one.get("bounds") is None)


def _zero(graph: OnnxGraph | None, one: Mapping[str, Any], array: Any) -> Any:
    if one.get("bounds") is not None:
        return one["bounds"][0]
    if is_real(array) or graph is None:
        return 0
    return graph.zero_point(one["name"]) if _is_bytes(one, array) else array


def _level(graph: OnnxGraph | None, one: Mapping[str, Any], array: Any, sign: int) -> Any:
    if one.get("bounds") is not None:
        return np.full_like(array, one["bounds"][sign > 0])
    if is_real(array):
        endless = graph is not None and graph.is_ordered(one["name"])
        return np.full_like(array, sign * (np.inf if endless else _LEVEL))
    if _is_bytes(one, array):
        limits = np.iinfo(array.dtype)
        return np.full_like(array, limits.max if sign > 0 else limits.min)
    return array


def _ends(graph: OnnxGraph | None, one: Mapping[str, Any], array: Any) -> Any:
    """The values to choose from, None where the drawn ones stay."""
    bounds, kind = one.get("bounds"), array.dtype
    if bounds is not None:
        low, high = bounds
        from_end = graph is not None and low == 0 and graph.is_index(one["name"])
        return [low, high, *((-1, -high - 1) if from_end else ())]
    if _is_bytes(one, array):
        return [np.iinfo(kind).min, np.iinfo(kind).max]
    if graph is None:
        return None
    if is_real(array) and graph.is_ordered(one["name"]):
        limits = np.finfo(kind)
        return [-np.inf, limits.min, limits.max, np.inf]
    if kind.kind in "iu" and graph.is_whole(one["name"]):
        limits = np.iinfo(kind)
        # the least number over -1 is none of its type, and ends the process
        least = limits.min + (limits.min < 0)
        near = np.arange(-9, 10) if limits.min < 0 else np.arange(19)
        return [*near, least, limits.max, limits.max // 3, limits.max - 1]
    return None


def _with_rows(array: Any) -> Any:
    """The tensor with rows of the least and the largest number, and of both infinities."""
    lines = array.reshape(-1, array.shape[-1]) if array.ndim else array.reshape(1, 1)
    limits = np.finfo(array.dtype)
    for row, value in zip(range(len(lines) - 1), (-np.inf, limits.min, np.inf), strict=False):
        lines[row] = value
    return array
