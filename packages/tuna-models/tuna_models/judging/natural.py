"""Inputs like those that models meet: photographs, pages of writing, a voice with pauses, and
silence. What is not real is drawn as `inputs.py` draws it.

Errors of rounding add up on these as they do in use. On normal inputs, of which all values are
about as large and independent, they are smaller in some networks by a factor of ten; and detectors
answer with more than zero only where there is something to detect.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import partial
from typing import Any

import numpy as np

from tuna_models.judging import inputs as drawn
from tuna_models.judging.draws import Arrays
from tuna_models.judging.inputs import is_real

#: Extents from which an axis is one of places or moments, and one of moments alone a sound
_LONG, _SOUND = 16, 400
#: Part of a channel of an image that is its own, and its grain
_OWN, _GRAIN = 0.3, 0.1
#: Pixels of a line of writing, at least and at most, and of those that a stroke is wide, one of
_LINE, _STROKES = (8, 40), 8
#: Values of a sound each second, and its lowest pitch
_RATE, _PITCH = 16_000, 90.0
#: Size of what a microphone records in silence
_FAINT = 1e-3
_SEEDS = (11, 12, 13)


def sets(
    inputs: Sequence[Mapping[str, Any]], values: Mapping[str, Any]
) -> Iterator[tuple[str, Arrays]]:
    """Yield titles and inputs; `values` are drawn ones."""
    for seed in _SEEDS:
        random = np.random.default_rng(seed)
        others = drawn.values(inputs, seed)
        yield f"natural ({seed})", _real(others, partial(_natural, random=random))
    if any(map(is_real, values.values())):
        random = np.random.default_rng(0)
        natural = _real(values, partial(_natural, random=random))
        yield "natural (0 to 1)", _real(natural, lambda array: np.clip(0.5 + 0.25 * array, 0, 1))
        for seed in _SEEDS:
            random = np.random.default_rng(seed)
            yield f"written ({seed})", _real(values, partial(_written, random=random))
        yield "silent", _real(values, np.zeros_like)
        yield "faint", _real(values, lambda array: _FAINT * array)
        for level in (0.3, 1.0):
            yield f"constant ({level})", _real(values, partial(np.full_like, fill_value=level))


def _real(values: Mapping[str, Any], make: Callable[[Any], Any]) -> Arrays:
    """The inputs with others in place of real ones."""
    return {
        name: np.asarray(make(array), array.dtype) if is_real(array) and array.size else array
        for name, array in values.items()
    }


def _natural(array: Any, random: np.random.Generator) -> Any:
    """Values of such a shape with a spread of about one."""
    axes = _axes(array.shape)
    if len(axes) == 1 and array.shape[axes[0]] >= _SOUND:
        return _voice(array.shape, axes[0], random)
    if not axes:
        return array
    shared = _smooth(tuple(array.shape[axis] for axis in axes), random)
    whole = _spread(shared, axes, array.shape)
    if whole.size == shared.size:
        return whole
    others = [extent for axis, extent in enumerate(array.shape) if axis not in axes]
    own = np.stack([_smooth(shared.shape, random) for _ in range(int(np.prod(others)))])
    own = np.moveaxis(own.reshape(*others, *shared.shape), range(-len(axes), 0), axes)
    image = np.sqrt(1 - _OWN**2) * whole + _OWN * own
    return image + _GRAIN * random.standard_normal(array.shape)


def _written(array: Any, random: np.random.Generator) -> Any:
    """A page of dark writing on light ground, in [-1, 1]; for a sound and what has no places the
    same as natural values."""
    axes = _axes(array.shape)
    if len(axes) < 2:
        return _natural(array, random)
    tall, wide = (array.shape[axis] for axis in axes)
    page, top = np.full((tall, wide), random.uniform(0.6, 1.0)), int(random.integers(0, _LONG // 2))
    while top < tall:
        height = int(random.integers(*_LINE))
        stroke = max(1, height // _STROKES)
        letters = random.random((_STROKES, wide // stroke + 1)) < 0.5
        words = np.repeat(random.random(wide // height + 1) < 0.8, height)[:wide]
        ink = np.repeat(np.repeat(letters, stroke, axis=0), stroke, axis=1)[: tall - top, :wide]
        page[top : top + len(ink)][ink & words] = random.uniform(-1.0, -0.4)
        top += height + int(random.integers(height // 2, 2 * height))
    return _spread(page, axes, array.shape)


def _axes(shape: Sequence[int]) -> list[int]:
    """The axes of places or moments, two at most: before the channels where these are last."""
    axes = [axis for axis, extent in enumerate(shape) if extent >= _LONG]
    return axes[-2:] if axes and axes[-1] == len(shape) - 1 else axes[:2]


def _spread(values: Any, axes: Sequence[int], shape: Sequence[int]) -> Any:
    """The values along these axes, the same along all others."""
    own = [extent if axis in axes else 1 for axis, extent in enumerate(shape)]
    return np.broadcast_to(values.reshape(own), shape)


def _smooth(shape: tuple[int, ...], random: np.random.Generator) -> Any:
    """Noise whose spectrum falls with the frequency, as that of photographs does, in [-2, 2]."""
    frequencies = np.meshgrid(*[np.fft.fftfreq(extent) * extent for extent in shape], indexing="ij")
    away = np.sqrt(sum(each**2 for each in frequencies))
    spectrum = np.fft.fftn(random.standard_normal(shape)) / np.maximum(away, 1.0)
    spectrum.flat[0] = 0.0
    noise = np.fft.ifftn(spectrum).real
    return np.clip(noise / max(float(noise.std()), 1e-9) + random.uniform(-0.5, 0.5), -2, 2)


def _voice(shape: Sequence[int], axis: int, random: np.random.Generator) -> Any:
    """Harmonics of a pitch that glides, in syllables with pauses, and faint noise, in [-1, 1]."""
    count = shape[axis]
    moments = np.arange(count) / _RATE
    lines = []
    for _ in range(int(np.prod(shape)) // count):
        start, phase = random.uniform(0, 6, 2)
        pitch = _PITCH * (1 + random.uniform(0, 1) + 0.3 * np.sin(9 * moments + start))
        angle = 2 * np.pi * np.cumsum(pitch) / _RATE
        tone = sum(np.sin(n * angle + phase) / n**1.2 for n in range(1, 24))
        loud = np.maximum(0.0, np.sin(2 * np.pi * 3.1 * moments + start)) * (
            np.sin(2 * np.pi * 0.7 * moments + phase) > -0.3
        )
        lines.append(0.3 * tone * loud + _FAINT * random.standard_normal(count))
    others = [extent for place, extent in enumerate(shape) if place != axis]
    return np.moveaxis(np.clip(np.stack(lines), -1, 1).reshape(*others, count), -1, axis)
