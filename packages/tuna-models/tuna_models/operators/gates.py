"""Weights of a recurrent layer as its steps read them (`recurrent_steps.Steps`): units in blocks,
the last filled up with units whose weights are 0, and all gates of a block side by side. Imports
TVM.

What is made of constants is a constant; of variables, Relax computes it when the model runs. The
first axis of all has the directions.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np
from tvm import relax

from tuna_models.compiler.graph import extents
from tuna_models.compiler.recurrent_steps import BLOCK, Steps


@dataclass(frozen=True)
class Gates:
    """Writes the weights of a layer; a value is an array or a variable."""

    builder: Any
    steps: Steps

    def filled(self, value: Any) -> Any:
        """The value with the units of each part of its last axis filled up."""
        *others, last = _shape(value)
        count = last // self.steps.units
        parts = self._padded(self._shaped(value, (*others, count, self.steps.units)))
        return self._shaped(parts, (*others, count * self.steps.wide))

    def of_input(self, value: Any) -> Any:
        """Weights of gates x inputs: inputs x columns of all directions."""
        _, _, inputs = _shape(value)
        parts = self._turned(self._in_blocks(self._turned(value, [0, 2, 1])), [2, 0, 1, 3])
        return self._shaped(parts, (inputs, -1))

    def of_state(self, value: Any) -> Any:
        """Weights of gates x units: blocks x units x columns."""
        return self._in_blocks(self._turned(value, [0, 2, 1]))

    def of_columns(self, value: np.ndarray) -> np.ndarray:
        """Values of gates, for each direction: blocks x columns."""
        whole: np.ndarray = self._in_blocks(value[:, np.newaxis])
        return whole[:, :, 0]

    def biases(self, value: Any, *, apart: bool) -> tuple[Any, Any]:
        """Return what is added to the part of the inputs, and to that of the state in the last
        gate if it is kept `apart`, of the biases of inputs and state side by side."""
        directions, count = _shape(value)[0], _shape(value)[1] // 2
        last = np.zeros(count, np.float32)
        last[-self.steps.units if apart else count :] = 1.0
        if isinstance(value, np.ndarray):
            one, other = np.split(value, 2, axis=1)
            added, kept = one + other * (1 - last), other[:, -self.steps.units :]
        else:
            one, other = (self._part(value, first, first + count) for first in (0, count))
            rest = self.builder.emit(relax.op.multiply(other, relax.const(1 - last)))
            added = self.builder.emit(relax.op.add(one, rest))
            kept = self._part(other, count - self.steps.units, count)
        blocks = self._in_blocks(self._shaped(added, (directions, 1, count)))
        return self._shaped(blocks, (-1,)), self.filled(kept)

    def _in_blocks(self, value: Any) -> Any:
        """Values x gates and units: blocks x values x columns."""
        directions, count, last = _shape(value)
        gates, blocks = last // self.steps.units, self.steps.blocks
        parts = self._shaped(self.filled(value), (directions, count, gates, blocks, BLOCK))
        parts = self._turned(parts, [0, 3, 1, 2, 4])
        return self._shaped(parts, (directions, blocks, count, gates * BLOCK))

    def _part(self, value: Any, first: int, end: int) -> Any:
        return self.builder.emit(relax.op.strided_slice(value, [1], [first], [end]))

    def _shaped(self, value: Any, shape: tuple[int, ...]) -> Any:
        if isinstance(value, np.ndarray):
            return value.reshape(shape)
        return self.builder.emit(relax.op.reshape(value, shape))

    def _turned(self, value: Any, order: list[int]) -> Any:
        if isinstance(value, np.ndarray):
            return value.transpose(order)
        return self.builder.emit(relax.op.permute_dims(value, order))

    def _padded(self, value: Any) -> Any:
        """The value with zeros behind the units of its last axis."""
        *others, _ = _shape(value)
        kind = value.dtype if isinstance(value, np.ndarray) else np.float32
        zeros = np.zeros((*others, self.steps.wide - self.steps.units), kind)
        if isinstance(value, np.ndarray):
            return np.concatenate([value, zeros], axis=-1)
        if not zeros.size:
            return value
        return self.builder.emit(relax.op.concat([value, relax.const(zeros)], axis=-1))


def leaf(value: Any) -> Any:
    """The value as an argument of an operator."""
    if isinstance(value, np.ndarray):
        kind = value.dtype if value.dtype.kind == "i" else np.float32
        return relax.const(np.ascontiguousarray(value, kind), str(np.dtype(kind)))
    return value


def _shape(value: Any) -> tuple[int, ...]:
    found = value.shape if isinstance(value, np.ndarray) else extents(value)
    assert found is not None
    return tuple(found)
