"""Weights of a recurrent layer as its steps read them: gates side by side, each filled up to whole
vectors with units whose weights are 0. Imports TVM.

What is made of constants is a constant; of variables, Relax computes it when the model runs.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np
from tvm import relax

from tuna_models.compiler.graph import extents


@dataclass(frozen=True)
class Gates:
    """Writes the weights of one direction; a value is an array or a variable."""

    builder: Any
    number: int  #: index of the direction: 0 forward, 1 reverse
    units: int
    wide: int  #: units of a gate that is filled up

    def own(self, value: Any) -> Any:
        """This direction's part of a value whose first axis has the directions."""
        if isinstance(value, np.ndarray):
            return value[self.number]
        ends = [self.number], [self.number + 1]
        part = self.builder.emit(relax.op.strided_slice(value, [0], *ends))
        return self._shaped(part, _shape(value)[1:])

    def filled(self, value: Any) -> Any:
        """The value with gates side by side along its last axis, filled up."""
        *others, last = _shape(value)
        parts = self._shaped(value, (*others, last // self.units, self.units))
        return self._shaped(self._padded(parts), (*others, last // self.units * self.wide))

    def of_input(self, value: Any) -> Any:
        """Weights of gates x inputs: inputs x gates."""
        return self.filled(self._turned(value, [1, 0]))

    def of_state(self, value: Any, columns: int) -> Any:
        """Weights of gates x units, in blocks of columns: block, unit, column."""
        parts = self._shaped(self.of_input(value), (self.units, -1, columns))
        return self._turned(parts, [1, 0, 2])

    def biases(self, value: Any, *, apart: bool) -> tuple[Any, Any]:
        """Return what is added to the part of the inputs, and to that of the state in the last
        gate if it is kept `apart`, of the biases of inputs and state side by side."""
        count = _shape(value)[0] // 2
        last = np.zeros(count, np.float32)
        last[-self.units if apart else count :] = 1.0
        if isinstance(value, np.ndarray):
            one, other = np.split(value, 2)
            return self.filled(one + other * (1 - last)), self.filled(other * last)
        one, other = (
            self.builder.emit(relax.op.strided_slice(value, [0], [first], [first + count]))
            for first in (0, count)
        )
        rest = self.builder.emit(relax.op.multiply(other, relax.const(1 - last)))
        kept = self.builder.emit(relax.op.multiply(other, relax.const(last)))
        return self.filled(self.builder.emit(relax.op.add(one, rest))), self.filled(kept)

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
        zeros = np.zeros((*others, self.wide - self.units), np.float32)
        if isinstance(value, np.ndarray):
            return np.concatenate([value, zeros], axis=-1)
        if not zeros.size:
            return value
        return self.builder.emit(relax.op.concat([value, relax.const(zeros)], axis=-1))


def leaf(value: Any) -> Any:
    """The value as an argument of an operator."""
    if isinstance(value, np.ndarray):
        return relax.const(np.ascontiguousarray(value, np.float32))
    return value


def _shape(value: Any) -> tuple[int, ...]:
    found = value.shape if isinstance(value, np.ndarray) else extents(value)
    assert found is not None
    return tuple(found)
