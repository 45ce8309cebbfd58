"""Fourier transforms of ONNX, of known length, as products with a matrix, and mel weights. Imports
TVM."""

from __future__ import annotations

from typing import Any

import numpy as np
import onnx
from tvm import relax, te

from tuna_models.compiler.graph import constant
from tuna_models.operators.conversion import Conversion, Converters, kind_of, shape_of
from tuna_models.refusals import Unsupported

#: Most values of a matrix: 64 MiB in fp32.
_LARGEST = 1 << 24


def _matrix(size: int, length: int, parts: tuple[int, int], *, inverse: bool, half: bool) -> Any:
    """Return the transform of rows of `size` numbers, cut or filled with zeros to `length`.

    The rows and the columns of the matrix are numbers times `parts`: 1 for real numbers, 2 for real
    and imaginary part. With `half` a spectrum has only the numbers that determine the rest.
    An inverse transform is `length` times as large.
    """
    used = min(size, length // 2 + 1 if half and inverse else length)
    answers = length // 2 + 1 if half and not inverse else length
    if size * parts[0] * answers * parts[1] > _LARGEST:
        raise Unsupported(f"a length of {length} is not supported: its matrix is too large")
    turns = np.outer(np.arange(used), np.arange(answers)) % length / length
    waves = np.exp((2j if inverse else -2j) * np.pi * turns)
    if half and inverse:  # the conjugates that are not stored
        twice = np.full(used, 2.0)
        twice[0] = 1.0
        if length % 2 == 0 and used == length // 2 + 1:
            twice[-1] = 1.0
        waves *= twice[:, None]
    matrix = np.zeros((size, parts[0], answers, parts[1]))
    matrix[:used, 0, :, 0] = waves.real
    if parts[1] == 2:
        matrix[:used, 0, :, 1] = waves.imag
    if parts[0] == 2:
        matrix[:used, 1, :, 0] = -waves.imag
        if parts[1] == 2:
            matrix[:used, 1, :, 1] = waves.real
    return matrix.reshape(size * parts[0], answers * parts[1])


def _transformed(
    node: Conversion, x: Any, matrix: Any, answer: tuple[int, ...], divisor: int = 1
) -> Any:
    """Multiply the rows of `x` with a matrix, and divide; the answer has this shape."""
    kind, rows = kind_of(x), node.shaped(x, (-1, matrix.shape[0]))
    found = node.emit(relax.op.matmul(rows, constant(matrix.astype(kind))))
    if divisor != 1:  # not in the matrix, whose values would cancel less well
        found = node.emit(relax.op.divide(found, relax.const(float(divisor), kind)))
    return node.shaped(found, answer)


def _dft(node: Conversion) -> Any:
    x, shape = node.inputs[0], shape_of(node.inputs[0])
    rank = len(shape)
    axis = node.axis(1) if node.opset < 20 else node.number(2, -2) % rank
    inverse, half = node.flag("inverse"), node.flag("onesided")
    size, parts = shape[axis], (shape[-1], 1 if inverse and half else 2)
    if half and (parts[0] == 1) == inverse:
        raise Unsupported("a one-sided transform of these numbers is not defined")
    length = node.number(1, 2 * (size - 1) if inverse and half else size)
    matrix = _matrix(size, length, parts, inverse=inverse, half=half)
    order = [*(at for at in range(rank - 1) if at != axis), axis, rank - 1]
    moved = node.emit(relax.op.permute_dims(x, order))
    rest = tuple(shape[at] for at in order[:-2])
    answer = (*rest, matrix.shape[1] // parts[1], parts[1])
    found = _transformed(node, moved, matrix, answer, length if inverse else 1)
    return node.emit(relax.op.permute_dims(found, list(np.argsort(order))))


def _stft(node: Conversion) -> Any:
    x, window = node.inputs[0], node.inputs[2]
    kind, shape = kind_of(x), shape_of(x)
    batch, size, parts = (*shape, 1)[:3]
    step = node.number(1, 1)
    length = node.number(3, size if window is None else shape_of(window)[0])
    half = node.flag("onesided", 1) and parts == 1
    count = (size - length) // step + 1
    if count < 1:
        raise Unsupported(f"a frame of {length} is longer than the signal of {size}")
    signal = node.shaped(x, (batch, size, parts))

    def framed(values: Any, *windows: Any) -> Any:
        def value(image: Any, frame: Any, at: Any, part: Any) -> Any:
            sample = values(image, frame * step + at, part)
            return sample * windows[0](at) if windows else sample

        return te.compute((batch, count, length, parts), value)

    frames = node.compute(framed, signal, *([] if window is None else [node.cast(window, kind)]))
    matrix = _matrix(length, length, (parts, 2), inverse=False, half=half)
    return _transformed(node, frames, matrix, (batch, count, matrix.shape[1] // 2, 2))


def _mel_weights(node: Conversion) -> Any:
    """Triangles of the mel scale over the numbers of a spectrum, by ONNX's definition."""
    bins, length, rate = (node.number(place, 0) for place in range(3))
    limits = (node.known(place) for place in (3, 4))
    lower, upper = (float(limit.reshape(())) for limit in limits if limit is not None)
    mels = 2595 * np.log10(1 + np.array([lower, upper]) / 700)
    edges = mels[0] + np.arange(bins + 2) * ((mels[1] - mels[0]) / (bins + 2))
    hertz = 700 * (10 ** (edges / 2595) - 1)
    places = ((length + 1) * hertz // rate).astype(np.int64)
    found = np.zeros((length // 2 + 1, bins))
    for number in range(bins):
        low, middle, high = places[number : number + 3]
        if middle == low:
            found[middle, number] = 1
        else:
            found[low : middle + 1, number] = np.arange(middle + 1 - low) / (middle - low)
        if high > middle:
            found[middle:high, number] = (high - np.arange(middle, high)) / (high - middle)
    kind = node.attributes.get("output_datatype", onnx.TensorProto.FLOAT)
    return constant(found.astype(onnx.helper.tensor_dtype_to_np_dtype(kind)))


#: Converters by operator.
CONVERTERS: Converters = {"DFT": _dft, "STFT": _stft, "MelWeightMatrix": _mel_weights}
