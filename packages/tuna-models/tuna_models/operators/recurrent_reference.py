"""Recurrent layers of rows of different lengths, which ONNX's reference evaluator takes for the
longest. Imports onnx."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import numpy as np
from onnx.reference.ops.op_gru import CommonGRU
from onnx.reference.ops.op_lstm import CommonLSTM
from onnx.reference.ops.op_rnn import CommonRNN


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


#: Operators for ONNX's reference evaluator.
OPERATORS = (_by_rows(CommonLSTM, 2), _by_rows(CommonGRU, 1), _by_rows(CommonRNN, 1))
