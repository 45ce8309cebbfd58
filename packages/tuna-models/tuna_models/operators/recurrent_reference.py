"""Recurrent layers of rows of different lengths, which ONNX's reference evaluator takes for the
longest. Imports onnx."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import numpy as np
from onnx.reference.op_run import OpRun
from onnx.reference.ops.op_gru import CommonGRU
from onnx.reference.ops.op_lstm import CommonLSTM
from onnx.reference.ops.op_rnn import CommonRNN

from tuna_models.operators import quantised_reference


def _by_rows(operator: type[Any], states: int) -> type[Any]:
    """ONNX's operator, so many of whose inputs are first states, on each row alone."""

    class Rows(operator):  # type: ignore[misc]
        op_domain = ""
        layout = 0  #: The attribute before opset 14, which has none

        def _run(self, *given: Any, **named: Any) -> Any:
            return _of_rows(super()._run, given, named, self.layout, states)

    Rows.__name__ = operator.__name__.removeprefix("Common")
    return Rows


def _of_rows(
    run: Callable[..., Sequence[Any]],
    given: Sequence[Any],
    named: Mapping[str, Any],
    layout: int,
    states: int,
) -> tuple[Any, ...]:
    """The answers of a layer, each row alone: behind its end they are 0, and its last state is that
    at the end. `given` are the operator's inputs, of which so many are first states."""
    inputs: list[Any] = [*given, *[None] * (5 + states - len(given))]
    (x, w, r, b, lengths), more = inputs[:5], inputs[5:]
    if lengths is None:
        return tuple(run(x, w, r, b, None, *more, **named))
    rows, batch, steps = list[tuple[Any, ...]](), 1 - layout, x.shape[layout]
    for row, length in enumerate(lengths):
        one = x.take([row], batch).take(range(max(length, 1)), layout)
        first = [None if each is None else each.take([row], batch) for each in more[:states]]
        answer, *last = run(one, w, r, b, None, *first, *more[states:], **named)
        if not length:
            answer = np.zeros_like(answer)
            begun = zip(last, first, strict=False)
            last = [np.zeros_like(end) if state is None else state for end, state in begun]
        room = [(0, 0)] * answer.ndim
        room[layout] = 0, steps - answer.shape[layout]
        rows.append((np.pad(answer, room), *last))
    axes = (0, 0, 0) if layout else (2, 1, 1)
    parts = zip(*rows, strict=True)
    return tuple(np.concatenate(each, axis) for each, axis in zip(parts, axes, strict=False))


class DynamicQuantizeLSTM(OpRun):
    """onnxruntime's LSTM in bytes, as its ContribOperators.md and its answers have it: inputs, and
    the states of all rows before each step, are rounded as by DynamicQuantizeLinear."""

    op_domain = "com.microsoft"

    def _run(self, x: Any, w: Any, r: Any, *more: Any, **named: Any) -> Any:
        b, _, first, cell, p, *grids = [*more, *[None] * 9][:9]
        ways, (steps, rows, _), units = len(w), x.shape, r.shape[1]
        zeros = np.zeros((ways, rows, units), np.float32)
        answers, states = np.zeros((steps, ways, rows, units), np.float32), list[Any]()
        weights = [_real(values, *grids[place : place + 2]) for values, place in ((w, 0), (r, 2))]
        for way in range(ways):
            bias = 0 if b is None else b[way].reshape(2, -1).sum(0)
            peep = np.zeros((3, units)) if p is None else p[way].reshape(3, units)
            inputs = _in_bytes(x) @ weights[0][way] + bias
            h, c = (zeros[way] if state is None else state[way] for state in (first, cell))
            backwards = named.get("direction") == "reverse" or way == 1
            for step in reversed(range(steps)) if backwards else range(steps):
                i, o, f, new = np.split(inputs[step] + _in_bytes(h) @ weights[1][way], 4, axis=1)
                c = _sigmoid(f + peep[2] * c) * c + _sigmoid(i + peep[0] * c) * np.tanh(new)
                h = (_sigmoid(o + peep[1] * c) * np.tanh(c)).astype(np.float32)
                answers[step, way] = h
            states.append((h, c.astype(np.float32)))
        return answers, *(np.stack(parts) for parts in zip(*states, strict=True))


def _sigmoid(x: Any) -> Any:
    return 1 / (1 + np.exp(-x))


def _real(values: Any, scale: Any, zero: Any) -> Any:
    """Weights in double precision, of grids by direction and column."""
    ways = len(values)
    offset = 0 if zero is None else zero.astype(np.float64).reshape(ways, 1, -1)
    return (values.astype(np.float64) - offset) * scale.reshape(ways, 1, -1)


def _in_bytes(x: Any) -> Any:
    """Values rounded to bytes, in double precision."""
    whole, scale, zero = quantised_reference.DynamicQuantizeLinear.rounded(x)
    return (whole.astype(np.float64) - zero) * float(scale)


#: Operators for ONNX's reference evaluator.
OPERATORS = (
    _by_rows(CommonLSTM, 2),
    _by_rows(CommonGRU, 1),
    _by_rows(CommonRNN, 1),
    DynamicQuantizeLSTM,
)
