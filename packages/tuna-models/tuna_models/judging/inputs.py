"""Inputs of a model, from a file or drawn at random within their bounds (`bounds`), and the error
of its outputs.

An input is a mapping as in a manifest (`manifest.ModelTensor`).
"""

from __future__ import annotations

import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from tuna.errors import BadInput
from tuna.libraries.tvm.model_answers import distance


def values(inputs: Sequence[Mapping[str, Any]], seed: int, recorded: str = "") -> dict[str, Any]:
    """Return an array for each input by name, from the npz file `recorded` or drawn.

    Raises BadInput.
    """
    if recorded:
        return read(inputs, Path(recorded))
    generator = np.random.default_rng(seed)
    return {
        one["name"]: draw(one["dtype"], one["shape"], one.get("bounds"), generator)
        for one in inputs
    }


def is_real(values: Any) -> bool:
    """Whether values are floating-point numbers."""
    return bool(np.asarray(values).dtype.kind == "f")


def draw(
    dtype: str, shape: Sequence[int], bounds: Sequence[int] | None, generator: np.random.Generator
) -> Any:
    """Draw values: normal ones, or integers within bounds; without bounds masks that begin with 1.

    Integers of eight bits are quantised values, drawn from their whole type.
    """
    kind = np.dtype(dtype)
    if bounds is None and kind.kind == "f":
        drawn: Any = np.float64 if kind.itemsize == 8 else np.float32
        return generator.standard_normal(shape, dtype=drawn).astype(kind, copy=False)
    if bounds is None and kind.kind in "iu" and kind.itemsize == 1:
        bounds = int(np.iinfo(kind).min), int(np.iinfo(kind).max)
    if bounds is not None:
        return generator.integers(bounds[0], bounds[1], shape, endpoint=True).astype(
            kind, copy=False
        )
    mask = generator.integers(0, 2, shape, dtype=np.uint8)
    # a row of zeros alone makes many models divide by zero
    mask[(..., slice(0, 1)) if shape else ()] = 1
    return mask.astype(kind, copy=False)


def read(inputs: Sequence[Mapping[str, Any]], path: Path) -> dict[str, Any]:
    """Read the inputs by name from a file of `numpy.savez`, unpickling nothing; raises BadInput."""
    found = {}
    try:
        with np.load(path, allow_pickle=False) as arrays:
            for one in inputs:
                name, shape, kind = one["name"], tuple(one["shape"]), np.dtype(one["dtype"])
                if name not in arrays or arrays[name].shape != shape or arrays[name].dtype != kind:
                    raise BadInput(
                        f"{path.name} has no array {name} of shape {shape} and type {kind}."
                    )
                found[name] = np.asarray(arrays[name], order="C")
    except BadInput:
        raise
    except Exception as error:  # NumPy, its zip files and the file system each have their own
        raise BadInput(f"{path.name} cannot be read: {str(error).splitlines()[0][:200]}") from None
    return found


def largest_error(found: Sequence[Any], expected: Sequence[Any]) -> float:
    """Return the largest difference of outputs relative to their output's largest magnitude.

    It is the largest float if shapes differ, or infinities and NaN are in other places. Raises
    BadInput for another number of outputs.
    """
    if len(found) != len(expected):
        raise BadInput(f"The models have {len(expected)} and {len(found)} outputs.")
    worst = max((distance(*pair) for pair in zip(found, expected, strict=True)), default=0.0)
    return min(worst, sys.float_info.max)
