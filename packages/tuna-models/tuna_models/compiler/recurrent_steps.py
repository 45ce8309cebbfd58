"""The steps of a recurrent layer, as its function is told (`recurrent_loops.py`)."""

from __future__ import annotations

from dataclasses import dataclass

#: Units of a block of weights, a multiple of any vector
BLOCK = 16
#: Numbers of gates by operator
GATES = {"LSTM": 4, "GRU": 3, "RNN": 1}


@dataclass(frozen=True)
class Steps:
    """A layer whose part of the inputs is computed. Arguments of its function: that part
    (steps, batch, directions x blocks x gates x BLOCK), weights (directions, blocks, units,
    gates x BLOCK), states (directions, batch, wide), bias of the reset gate's product
    (directions, wide), lengths (batch), peepholes (directions, 3 x wide), scales of the weights
    (directions, blocks, gates x BLOCK); results: answers (steps, directions, batch, wide) and
    states."""

    kind: str
    length: int
    batch: int
    units: int  #: Size of the state
    reverse: tuple[bool, ...]  #: whether it begins at the end, by direction
    functions: tuple[str, ...]  #: of gates and state
    reset_after: bool  #: A GRU multiplies the state by its weights before it resets it
    ragged: bool  #: Rows of the batch have lengths of their own
    peepholes: bool
    dynamic: bool = False  #: The state is rounded to bytes for its product, on a scale of its own

    @property
    def wide(self) -> int:
        """Units, filled up to whole blocks with those whose weights are 0: their state stays 0."""
        return -(-self.units // BLOCK) * BLOCK

    @property
    def blocks(self) -> int:
        """Number of blocks of units."""
        return self.wide // BLOCK

    @property
    def results(self) -> list[tuple[int, ...]]:
        """Shapes of the answers and the last states."""
        state = (len(self.reverse), self.batch, self.wide)
        return [(self.length, *state), *[state] * (2 if self.kind == "LSTM" else 1)]
