"""Recurrent layers of ONNX, LSTM, GRU and RNN, as Relax. Imports TVM.

The part of the inputs in the gates of all steps is one product of matrices, a task with a kernel
like any other. The steps are one function for the whole sequence, so that a thousand of them take
no longer to compile than one:

    for step, for row of the batch
        gates = part of the inputs + state * weights        columns in registers, in vectors
        state and answer from the gates                     in vectors

Hidden units are filled up to whole vectors with units whose weights are 0: their state stays 0.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import numpy as np
from tvm import relax, te, tirx
from tvm.script.ir_builder import IRBuilder
from tvm.script.ir_builder import tirx as T  # noqa: N812 (as TVM names it)

from tuna_models.compiler.graph import constant_of, extents
from tuna_models.operators.conversion import kind_of, shape_of
from tuna_models.operators.gates import Gates, leaf
from tuna_models.refusals import Unsupported

_LANES = 16
#: Numbers of gates by operator, and the default functions of gates and state.
_GATES = {"LSTM": 4, "GRU": 3, "RNN": 1}
_DEFAULTS = {"LSTM": ("sigmoid", "tanh", "tanh"), "GRU": ("sigmoid", "tanh"), "RNN": ("tanh",)}
_FUNCTIONS: Mapping[str, Callable[[Any], Any]] = {
    "sigmoid": tirx.sigmoid,
    "tanh": tirx.tanh,
    "relu": lambda x: tirx.max(x, tirx.const(0.0, "float32")),
}


@dataclass(frozen=True)
class _Steps:
    """The steps of one direction of a layer."""

    kind: str
    length: int
    batch: int
    units: int  #: Size of the state
    reverse: bool
    functions: tuple[str, ...]
    reset_after: bool  #: A GRU multiplies the state by its weights before it resets it
    ragged: bool  #: Rows of the batch have lengths of their own

    @property
    def wide(self) -> int:
        """Units, filled up to whole vectors."""
        return -(-self.units // _LANES) * _LANES

    @property
    def columns(self) -> int:
        """Number of sums that are in registers together."""
        return next(count for count in (64, 32, _LANES) if self.wide % count == 0)


def convert(kind: str, builder: Any, inputs: Sequence[Any], attributes: Mapping[str, Any]) -> Any:
    """The outputs of the operator `kind`; raises Unsupported."""
    x, *others = [*inputs, *[None] * 8][:8]
    weights, recurrent, bias, peepholes = (
        _trained(value) for value in (*others[:3], others[6] if kind == "LSTM" else None)
    )
    states = [others[4], others[5]] if kind == "LSTM" else [others[4]]
    if attributes.get("clip") or attributes.get("input_forget"):
        raise Unsupported("the attributes clip and input_forget are not supported")
    by_batch = attributes.get("layout", 0)
    if by_batch:
        x, *states = (_turned(builder, value, [1, 0, 2]) for value in (x, *states))
    shape = shape_of(x)
    if kind_of(x) != "float32":
        raise Unsupported(f"it has values of {kind_of(x)}, and only fp32 is supported")
    ends = None if others[3] is None else _ends(builder, others[3], shape[0])
    backwards = attributes.get("direction", b"forward") == b"reverse"
    answers = []
    directions, _, units = shape_of(others[1])
    for number, functions in enumerate(_functions(kind, directions, attributes)):
        steps = _Steps(
            kind=kind,
            length=shape[0],
            batch=shape[1],
            units=units,
            reverse=backwards or number == 1,
            functions=functions,
            reset_after=bool(attributes.get("linear_before_reset", 0)),
            ragged=ends is not None,
        )
        own = [_state(builder, value, number, steps) for value in states]
        gates = Gates(builder, number, units, steps.wide)
        parts = [
            None if part is None else gates.own(part)
            for part in (weights, recurrent, bias, peepholes)
        ]
        answers.append(_direction(builder, steps, gates, x, own, parts, ends))
    whole = [_together(builder, parts) for parts in zip(*answers, strict=True)]
    if by_batch:
        orders = ([2, 0, 1, 3], [1, 0, 2], [1, 0, 2])
        whole = [
            _turned(builder, value, order) for value, order in zip(whole, orders, strict=False)
        ]
    return relax.Tuple(whole)


def _direction(
    builder: Any,
    steps: _Steps,
    gates: Gates,
    x: Any,
    states: list[Any],
    trained: Sequence[Any],
    ends: Any,
) -> list[Any]:
    """All answers of one direction and its last states, with an axis for the directions.

    `trained` are weights of the inputs and of the state, bias and peepholes, gates side by side;
    `ends` the lengths of the rows, None where they are as long as the sequence.
    """
    weights, recurrent, bias, peepholes = trained
    if bias is None:
        bias = np.zeros(2 * _GATES[steps.kind] * steps.units, np.float32)
    # the bias of the product with the state is reset as well
    added, kept = gates.biases(bias, apart=steps.reset_after)
    product = builder.normalize(relax.op.matmul(x, leaf(gates.of_input(weights))))
    product = builder.normalize(relax.op.add(product, leaf(added)))
    operands = [product, leaf(gates.of_state(recurrent, steps.columns)), *states]
    if steps.reset_after:
        operands.append(leaf(kept))
    if ends is not None:
        operands.append(ends)
    if peepholes is not None:
        operands.append(leaf(gates.filled(peepholes)))
    program = partial(_program, steps, peepholes is not None)
    ran = builder.emit_te(program, *operands, primfunc_name_hint=steps.kind.lower())
    answers = []
    for number in range(1 + len(states)):
        value = builder.emit(relax.TupleGetItem(ran, number))
        if steps.wide != steps.units:
            last = len(extents(value) or ()) - 1
            value = builder.emit(relax.op.strided_slice(value, [last], [0], [steps.units]))
        answers.append(builder.emit(relax.op.expand_dims(value, 1 if number == 0 else 0)))
    return answers


def _program(steps: _Steps, peepholes: bool, *tensors: Any) -> Any:
    """Answers of all steps and the last states."""
    states = 2 if steps.kind == "LSTM" else 1
    state = (steps.batch, steps.wide)
    shapes = [(steps.length, *state), *[state] * states]
    outputs = [
        tirx.decl_buffer(shape, "float32", f"out{number}") for number, shape in enumerate(shapes)
    ]

    def body(ins: Sequence[Any], outs: Sequence[Any]) -> Any:
        with IRBuilder() as ib:
            _Body(steps, ins, outs, peepholes).write()
        return ib.get()

    return te.extern(
        shapes,
        list(tensors),
        body,
        dtype=["float32"] * len(shapes),
        out_buffers=outputs,
        name=steps.kind.lower(),
    )


class _Body:
    """The statements of the steps, written in the order in which they run."""

    def __init__(
        self, steps: _Steps, ins: Sequence[Any], outs: Sequence[Any], peepholes: bool
    ) -> None:
        self._steps = steps
        self._given, self._weights, *others = ins
        self._answers, *self._states = outs
        self._first, others = others[: len(self._states)], others[len(self._states) :]
        self._kept = others.pop(0) if steps.reset_after else None
        self._ends = others.pop(0) if steps.ragged else None
        self._peepholes = others.pop(0) if peepholes else None

    def write(self) -> None:
        """Write all steps of all rows."""
        steps = self._steps
        with T.serial(0, steps.batch) as row:
            self._gates = T.alloc_buffer([_GATES[steps.kind] * steps.wide], "float32")
            self._reset = T.alloc_buffer([steps.wide], "float32")
            self._sums = T.alloc_buffer([steps.columns], "float32", scope="local")
            for first, state in zip(self._first, self._states, strict=True):
                self._each(partial(_copy, first, state, row))
            with T.serial(0, steps.length) as number:
                self._write_one(row, number)

    def _write_one(self, row: Any, number: Any) -> None:
        """Write a step, or zeros where the row has ended."""
        if self._ends is None:
            self._step(row, self._steps.length - 1 - number if self._steps.reverse else number)
            return
        end, zero = self._ends[row], tirx.const(0.0, "float32")
        with T.If(number < end):
            with T.Then():
                self._step(row, end - 1 - number if self._steps.reverse else number)
            with T.Else():
                self._each(lambda at: T.buffer_store(self._answers, zero, [number, row, at]))

    def _step(self, row: Any, at: Any) -> None:
        steps, state = self._steps, self._states[0]
        given = lambda column: self._given[at, row, column]  # noqa: E731 (it is passed on)
        of_state = lambda unit: state[row, unit]  # noqa: E731 (it is passed on)
        if steps.kind != "GRU":
            self._product(range(_GATES[steps.kind]), given, of_state)
        else:
            self._product(range(2), given, of_state)
            if self._kept is not None:
                self._product([2], self._kept.__getitem__, of_state)
            else:
                function = _FUNCTIONS[steps.functions[0]]
                self._each(
                    lambda j: T.buffer_store(
                        self._reset, function(self._gate(1, j)) * state[row, j], [j]
                    )
                )
                self._product([2], given, lambda unit: self._reset[unit])
        {"LSTM": self._lstm, "GRU": self._gru, "RNN": self._rnn}[steps.kind](row, at)

    def _lstm(self, row: Any, at: Any) -> None:
        f, g, h = (_FUNCTIONS[name] for name in self._steps.functions)
        state, cell = self._states

        def peep(number: int, j: Any, value: Any) -> Any:
            return (
                value
                if self._peepholes is None
                else value + self._peepholes[number * self._steps.wide + j] * cell[row, j]
            )

        def unit(j: Any) -> None:
            into, keep = f(peep(0, j, self._gate(0, j))), f(peep(2, j, self._gate(2, j)))
            T.buffer_store(cell, keep * cell[row, j] + into * g(self._gate(3, j)), [row, j])
            T.buffer_store(state, f(peep(1, j, self._gate(1, j))) * h(cell[row, j]), [row, j])
            T.buffer_store(self._answers, state[row, j], [at, row, j])

        self._each(unit)

    def _gru(self, row: Any, at: Any) -> None:
        f, g = (_FUNCTIONS[name] for name in self._steps.functions)
        (state,), wide = self._states, self._steps.wide

        def unit(j: Any) -> None:
            found = self._gate(2, j)
            if self._kept is not None:
                found = self._given[at, row, 2 * wide + j] + f(self._gate(1, j)) * found
            T.buffer_store(self._reset, f(self._gate(0, j)), [j])
            old = self._reset[j]
            T.buffer_store(
                state, (tirx.const(1.0, "float32") - old) * g(found) + old * state[row, j], [row, j]
            )
            T.buffer_store(self._answers, state[row, j], [at, row, j])

        self._each(unit)

    def _rnn(self, row: Any, at: Any) -> None:
        function = _FUNCTIONS[self._steps.functions[0]]

        def unit(j: Any) -> None:
            T.buffer_store(self._states[0], function(self._gate(0, j)), [row, j])
            T.buffer_store(self._answers, self._states[0][row, j], [at, row, j])

        self._each(unit)

    def _gate(self, number: int, unit: Any) -> Any:
        return self._gates[number * self._steps.wide + unit]

    def _product(
        self, gates: Sequence[int], first: Callable[[Any], Any], state: Callable[[Any], Any]
    ) -> None:
        """Add the state times the weights to `first`, for gates side by side."""
        columns, blocks = self._steps.columns, self._steps.wide // self._steps.columns
        with T.serial(gates[0] * blocks, (gates[-1] + 1) * blocks) as block:
            self._columns(lambda at: T.buffer_store(self._sums, first(block * columns + at), [at]))
            with T.serial(0, self._steps.units) as unit:
                self._columns(
                    lambda at: T.buffer_store(
                        self._sums,
                        self._sums[at] + state(unit) * self._weights[block, unit, at],
                        [at],
                    )
                )
            self._columns(
                lambda at: T.buffer_store(self._gates, self._sums[at], [block * columns + at])
            )

    def _columns(self, write: Callable[[Any], None]) -> None:
        with T.unroll(0, self._steps.columns // _LANES) as part, T.vectorized(0, _LANES) as lane:
            write(part * _LANES + lane)

    def _each(self, write: Callable[[Any], None]) -> None:
        with T.serial(0, self._steps.wide // _LANES) as part, T.vectorized(0, _LANES) as lane:
            write(part * _LANES + lane)


def _copy(source: Any, target: Any, row: Any, at: Any) -> None:
    T.buffer_store(target, source[row, at], [row, at])


def _functions(kind: str, directions: int, attributes: Mapping[str, Any]) -> list[tuple[str, ...]]:
    """The functions of gates and state by direction."""
    named = [name.decode().lower() for name in attributes.get("activations", ())]
    unknown = sorted({*named} - {*_FUNCTIONS})
    if unknown:
        raise Unsupported(f"the activation {', '.join(unknown)} is not supported")
    count = len(_DEFAULTS[kind])
    return [
        tuple(named[number * count :][:count]) or _DEFAULTS[kind] for number in range(directions)
    ]


def _trained(value: Any) -> Any:
    """The array of a constant, or a variable."""
    found = None if value is None else constant_of(value)
    return value if found is None else found


def _ends(builder: Any, lengths: Any, steps: int) -> Any:
    """The length of each row, at most the sequence's, as int32; None where all are as long."""
    known = constant_of(lengths)
    if known is not None:
        whole = np.clip(known, 0, steps).astype(np.int32)
        return None if np.all(whole == steps) else relax.const(whole)
    # the number of steps before the end: what compares lengths with steps says what they may be
    numbers = relax.const(np.arange(steps).reshape(steps, 1).astype(kind_of(lengths)))
    inside = builder.emit(relax.op.less(numbers, lengths))
    return builder.emit(relax.op.sum(builder.emit(relax.op.astype(inside, "int32")), [0]))


def _state(builder: Any, value: Any, number: int, steps: _Steps) -> Any:
    """The first state of a direction, of all units."""
    shape, more = (steps.batch, steps.units), steps.wide - steps.units
    if value is None:
        return relax.const(np.zeros((steps.batch, steps.wide), np.float32))
    known = constant_of(value)
    if known is not None:
        return relax.const(np.pad(known[number], [(0, 0), (0, more)]))
    own = builder.emit(relax.op.strided_slice(value, [0], [number], [number + 1]))
    own = builder.emit(relax.op.reshape(own, shape))
    if not more:
        return own
    zeros = relax.const(np.zeros((steps.batch, more), np.float32))
    return builder.emit(relax.op.concat([own, zeros], axis=1))


def _turned(builder: Any, value: Any, order: Sequence[int]) -> Any:
    return None if value is None else builder.emit(relax.op.permute_dims(value, list(order)))


def _together(builder: Any, parts: Sequence[Any]) -> Any:
    """The directions side by side: all answers have their axis second, states first."""
    if len(parts) == 1:
        return parts[0]
    axis = 1 if len(extents(parts[0]) or ()) == 4 else 0
    return builder.emit(relax.op.concat(list(parts), axis=axis))
