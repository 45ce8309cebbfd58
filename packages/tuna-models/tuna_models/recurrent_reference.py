"""Recurrent layers of rows of different lengths, which ONNX's reference evaluator takes for the
longest. Imports onnx."""

from __future__ import annotations

from typing import Any

import numpy as np
from onnx.reference.op_run import OpRun
from onnx.reference.ops.op_gru import CommonGRU
from onnx.reference.ops.op_lstm import CommonLSTM
from onnx.reference.ops.op_rnn import CommonRNN


class _OfRows(OpRun):
    """Each row alone; behind its end its answers are 0, and its last state is that at the end."""

    op_domain = ""
    layout = 0  #: The attribute before opset 14, which has none
    states = 1  #: Number of states

    def _run(
        self, x: Any, w: Any, r: Any, b: Any = None, lengths: Any = None, *more: Any, **named: Any
    ) -> tuple[Any, ...]:
        run = super()._run  # type: ignore[misc]
        if lengths is None:
            return tuple(run(x, w, r, b, None, *more, **named))
        rows, batch, steps = list[tuple[Any, ...]](), 1 - self.layout, x.shape[self.layout]
        more = (*more, *[None] * (self.states - len(more)))
        for row, length in enumerate(lengths):
            one = x.take([row], batch).take(range(max(length, 1)), self.layout)
            first = [None if each is None else each.take([row], batch) for each in more]
            first[self.states :] = more[self.states :]  # weights
            answer, *last = run(one, w, r, b, None, *first, **named)
            if not length:
                answer = np.zeros_like(answer)
                begun = zip(last, first, strict=False)
                last = [np.zeros_like(end) if state is None else state for end, state in begun]
            room = [(0, 0)] * answer.ndim
            room[self.layout] = 0, steps - answer.shape[self.layout]
            rows.append((np.pad(answer, room), *last))
        axes = (0, 0, 0) if self.layout else (2, 1, 1)
        parts = zip(*rows, strict=True)
        return tuple(np.concatenate(each, axis) for each, axis in zip(parts, axes, strict=False))


class LSTM(_OfRows, CommonLSTM):
    """Its third weight is that of the peepholes."""

    states = 2


class GRU(_OfRows, CommonGRU):
    """As ONNX's, by rows."""


class RNN(_OfRows, CommonRNN):
    """As ONNX's, by rows."""


#: Operators for ONNX's reference evaluator.
OPERATORS = (LSTM, GRU, RNN)
