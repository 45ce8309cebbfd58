"""The loops of a recurrent layer's steps, as TIR. Imports TVM.

    for direction, part of the batch:                                              parallel
        for step:
            for tile of units, forwards and backwards in turn:
                for tile of rows:
                    acc[rows][gates][units] = part of the inputs + H R             registers
                    H', C = gates of acc                                           L1

The weights R are read once a step for all rows of a tile. Where they fill a core's L2, every other
step reads them from the end, as those that it was left with are there still. States are there
twice, of the step before and of this one; where the product is one of bfloat16 or bytes, H is
rounded for it behind each step, and kept in fp32 beside.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Mapping, Sequence
from contextlib import nullcontext
from typing import Any

from tvm import te, tirx
from tvm.script.ir_builder import IRBuilder
from tvm.script.ir_builder import tirx as T  # noqa: N812 (as TVM names it)

from tuna.libraries.tvm import function_costs
from tuna.libraries.tvm.kernels import dots, epilogue, stages
from tuna.libraries.tvm.kernels.instructions import DotProduct
from tuna.libraries.tvm.kernels.machine import Machine
from tuna_models.compiler.blocked import opaque
from tuna_models.compiler.recurrent_steps import BLOCK, GATES, Steps

#: Functions of gates and state by ONNX's names
FUNCTIONS: Mapping[str, Callable[[Any], Any]] = {
    "sigmoid": tirx.sigmoid,
    "tanh": tirx.tanh,
    "relu": epilogue.TIR["relu"],
}
#: Share of the registers that sums take, and the most vectors of units of a tile
_SUMS, _MAX_VECTORS = 0.75, 4
#: Places of the range of a state, of its scale and its zero point
_LOW, _HIGH, _SCALE, _ZERO = range(4)


def function(
    steps: Steps,
    machine: Machine,
    operands: Sequence[tuple[tuple[int, ...], str]],
    dot: DotProduct | None,
) -> Any:
    """The function for operands of these shapes and types; the weights are in words of `dot`, and
    with words of bytes the last operand is their sums over the units."""
    tensors = [
        te.placeholder(shape, kind, f"in{place}") for place, (shape, kind) in enumerate(operands)
    ]
    outs = [tirx.decl_buffer(shape, "float32", f"out{n}") for n, shape in enumerate(steps.results)]

    def body(ins: Sequence[Any], outs: Sequence[Any]) -> Any:
        with IRBuilder() as ib:
            _Body(steps, machine, ins, outs, dot).write()
        return ib.get()

    kinds = ["float32"] * len(outs)
    name = steps.kind.lower()
    results = te.extern(steps.results, tensors, body, dtype=kinds, out_buffers=outs, name=name)
    made = opaque(stages.module_of([*tensors, *results])["main"])
    rows, columns = steps.length * steps.batch * len(steps.reverse), GATES[steps.kind] * steps.units
    return made.with_attr(function_costs.OPERATIONS, 2 * rows * columns * steps.units)


class _Body:
    """The statements of the steps, written in the order in which they run."""

    def __init__(
        self,
        steps: Steps,
        machine: Machine,
        ins: Sequence[Any],
        outs: Sequence[Any],
        dot: DotProduct | None,
    ) -> None:
        self._steps, self._lanes = steps, machine.floats
        self._gate_count = GATES[steps.kind]
        self._registers = int(machine.registers * _SUMS)
        self._given, self._weights, *others = ins
        self._answers, *self._states = outs
        self._first, others = others[: len(self._states)], others[len(self._states) :]
        self._kept = others.pop(0) if steps.reset_after else None
        self._ends = others.pop(0) if steps.ragged else None
        self._peepholes = others.pop(0) if steps.peepholes else None
        self._scales: Any = others.pop(0) if steps.dynamic else None
        self._weight_sums = others.pop(0) if steps.dynamic and dot else None
        self._dot = dot
        self._sum_type = "int32" if self._weight_sums is not None else "float32"
        most = steps.batch if steps.ragged else max(1, machine.cores // len(steps.reverse))
        most = 1 if steps.dynamic else most  # the state of all rows is on one scale
        self._parts = next(n for n in range(most, 0, -1) if steps.batch % n == 0)
        self._rows = steps.batch // self._parts
        self._parallel = machine.cores > 1 and len(steps.reverse) * self._parts > 1

    def write(self) -> None:
        """Write all steps of all directions and rows."""
        steps, rows = self._steps, self._rows
        loop = T.parallel if self._parallel else T.serial
        with loop(0, len(steps.reverse) * self._parts) as item:
            self._way, self._top = item // self._parts, item % self._parts * rows
            self._state, self._cell, self._reset = (
                T.alloc_buffer([2, rows, steps.wide], "float32") for _ in range(3)
            )
            self._own = [self._state, self._cell][: len(self._states)]
            self._read: Any = self._state
            self._range: Any = None  #: of a state in bytes
            if self._dot or steps.dynamic:
                kind = self._dot.reads if self._dot else "float32"
                self._read = T.alloc_buffer([2, rows, steps.wide], kind)
            if steps.dynamic:
                self._range = T.alloc_buffer([4], "float32")
                self._extremes = T.alloc_buffer([2, self._lanes], "float32", scope="local")
            self._start()
            end: Any = steps.length
            if self._ends is not None:
                end = T.bind(self._ends[self._top])
            with T.serial(0, end) as number:
                self._old, self._new = number % 2, (number + 1) % 2
                self._step(number, self._place(number, end))
            if self._ends is not None:
                with T.serial(end, steps.length) as number, T.serial(0, rows) as row:
                    zero = tirx.const(0.0, "float32")
                    self._each(
                        lambda at: T.buffer_store(
                            self._answers, zero, [number, self._way, self._top + row, at]
                        )
                    )
            with T.serial(0, rows) as row:
                self._each(lambda at: self._end(end, row, at))

    def _place(self, number: Any, end: Any) -> Any:
        """The place of a step in the sequence."""
        backwards, reverse = end - 1 - number, self._steps.reverse
        if len(set(reverse)) == 1:
            return backwards if reverse[0] else number
        return tirx.Select(self._way == int(reverse[1]), backwards, number)

    def _start(self) -> None:
        """Copy the first states."""
        with T.serial(0, self._rows) as row:

            def copy(at: Any) -> None:
                for first, own in zip(self._first, self._own, strict=True):
                    T.buffer_store(own, first[self._way, self._top + row, at], [0, row, at])

            self._each(copy)
        self._round(self._state, 0)

    def _end(self, end: Any, row: Any, at: Any) -> None:
        """Copy the last states."""
        for own, last in zip(self._own, self._states, strict=True):
            T.buffer_store(last, own[end % 2, row, at], [self._way, self._top + row, at])

    def _round(self, source: Any, place: Any) -> None:
        """Write a state as the product reads it."""
        if self._range is not None:
            self._find_scale(place)
        elif self._dot is None:
            return
        with T.serial(0, self._rows) as row:
            self._each(lambda at: self._round_one(source[place, row, at], [place, row, at]))

    def _round_one(self, value: Any, at: list[Any]) -> None:
        if self._range is None:
            assert self._dot is not None
            value = epilogue.rounded(value, "bfloat16", self._dot.rounding)
            T.buffer_store(self._read, tirx.reinterpret("uint16", value), at)
            return
        scale, zero = self._range[_SCALE], self._range[_ZERO]
        low, high = tirx.const(0.0, "float32") - zero, tirx.const(255.0, "float32") - zero
        whole = epilogue.nearest(epilogue.minimum(epilogue.maximum(value / scale, low), high))
        if self._dot is not None:
            whole = (whole + zero).astype("int32").astype(self._dot.reads)
        T.buffer_store(self._read, whole, at)

    def _find_scale(self, place: Any) -> None:
        """Write scale and zero point of a state's bytes, as DynamicQuantizeLinear has them."""
        zero, limit = tirx.const(0.0, "float32"), tirx.const(255.0, "float32")
        extremes = (epilogue.minimum, epilogue.maximum)
        for number in (_LOW, _HIGH):
            T.buffer_store(self._range, zero, [number])
            with T.vectorized(0, self._lanes) as lane:
                T.buffer_store(self._extremes, zero, [number, lane])
        parts = self._steps.wide // self._lanes
        with T.serial(0, self._rows) as row, T.serial(0, parts) as part:
            for number, extreme in enumerate(extremes):
                with T.vectorized(0, self._lanes) as lane:
                    value = self._state[place, row, part * self._lanes + lane]
                    value = extreme(self._extremes[number, lane], value)
                    T.buffer_store(self._extremes, value, [number, lane])
        with T.serial(0, self._lanes) as lane:
            for number, extreme in enumerate(extremes):
                value = extreme(self._range[number], self._extremes[number, lane])
                T.buffer_store(self._range, value, [number])
        scale = (self._range[_HIGH] - self._range[_LOW]) / limit
        one = tirx.const(1.0, "float32")
        T.buffer_store(self._range, tirx.Select(scale > zero, scale, one), [_SCALE])
        first = (zero - self._range[_LOW]) / self._range[_SCALE]
        T.buffer_store(self._range, epilogue.nearest(epilogue.minimum(first, limit)), [_ZERO])

    def _step(self, number: Any, at: Any) -> None:
        steps = self._steps
        self._at = at
        if steps.kind == "GRU" and not steps.reset_after:
            self._product(number, [0, 1], self._state, self._old, self._reset_gates)
            self._round(self._reset, 1)
            self._product(number, [2], self._reset, 1, self._gru)
        else:
            unit = {"LSTM": self._lstm, "GRU": self._gru, "RNN": self._rnn}[steps.kind]
            self._product(number, range(self._gate_count), self._state, self._old, unit)
        self._round(self._state, self._new)

    def _product(
        self,
        number: Any,
        gates: Sequence[int],
        source: Any,
        place: Any,
        write: Callable[[Mapping[int, Any], Any, Any], None],
    ) -> None:
        """Add the state times the weights of some gates to the part of the inputs, and `write`
        each unit by the sums of its gates, the row and the unit."""
        vectors = self._steps.wide // self._lanes
        row_tiles = -(-self._rows // max(1, self._registers // len(gates)))
        rows = -(-self._rows // row_tiles)
        width = next(
            count
            for count in (_MAX_VECTORS, 2, 1)
            if vectors % count == 0 and (count == 1 or rows * len(gates) * count <= self._registers)
        )
        tiles = vectors // width
        with T.serial(0, tiles) as forward, T.serial(0, row_tiles) as row_tile:
            tile = tirx.Select(number % 2 == 1, tiles - 1 - forward, forward)
            # the last rows begin early enough to be as many, and are the same twice
            row = tirx.min(row_tile * rows, self._rows - rows) if row_tiles > 1 else 0
            places = list(itertools.product(range(rows), gates, range(width)))
            sums = {
                at: T.alloc_buffer([self._lanes], self._sum_type, scope="local") for at in places
            }
            read = self._read if self._dot or self._range is not None else source
            self._sum(sums, row, tile * width, read, place)
            for r, v in itertools.product(range(rows), range(width)):
                with T.vectorized(0, self._lanes) as lane:
                    unit = (tile * width + v) * self._lanes + lane
                    of_gate = {
                        gate: self._real(sums[r, gate, v][lane], gate, row + r, unit)
                        for gate in gates
                    }
                    write(of_gate, row + r, unit)

    def _sum(
        self,
        sums: Mapping[tuple[int, int, int], Any],
        row: Any,
        vector: Any,
        source: Any,
        place: Any,
    ) -> None:
        """Write the sums of a tile, by row, gate and vector of units, from a row and vector on."""

        def column(gate: int, v: int) -> tuple[Any, Any]:
            unit = (vector + v) * self._lanes
            return unit // BLOCK, gate * BLOCK + unit % BLOCK

        for (r, gate, v), buffer in sums.items():
            with T.vectorized(0, self._lanes) as lane:
                unit = (vector + v) * self._lanes + lane
                T.buffer_store(buffer, self._begin(gate, row + r, unit), [lane])
        if self._dot is None:
            with T.serial(0, self._steps.units) as unit:
                for (r, gate, v), buffer in sums.items():
                    block, first = column(gate, v)
                    with T.vectorized(0, self._lanes) as lane:
                        weight = self._weights[self._way, block, unit, first + lane]
                        state = source[place, row + r, unit]
                        value = buffer[lane] + state * weight.astype("float32")
                        T.buffer_store(buffer, value, [lane])
            return
        word, lanes, whole = self._dot.word, self._lanes, tirx.Ramp(0, 1, self._lanes)
        with T.attr(0, "pragma_import_llvm", self._dot.text) if self._dot.text else nullcontext():
            with T.serial(0, -(-self._steps.units // word)) as step:
                for (r, gate, v), buffer in sums.items():
                    block, first = column(gate, v)
                    state = [place, row + r, tirx.Ramp(step * word, 1, word)]
                    shared = tirx.reinterpret("int32", tirx.BufferLoad(source, state))
                    at = [self._way, block, step, tirx.Ramp(first, 1, lanes)]
                    weights = tirx.BufferLoad(self._weights, at)
                    old = tirx.BufferLoad(buffer, [whole])
                    value = dots.total(self._dot, old, tirx.Broadcast(shared, lanes), weights)
                    T.buffer_store(buffer, value, [whole])

    def _begin(self, gate: int, row: Any, unit: Any) -> Any:
        """The value that a sum begins with."""
        if self._range is not None:
            return tirx.const(0, self._sum_type)
        if gate == 2 and self._kept is not None:
            return self._kept[self._way, unit]
        return self._of_input(gate, row, unit)

    def _real(self, total: Any, gate: int, row: Any, unit: Any) -> Any:
        """The value of a sum."""
        if self._range is None:
            return total
        at = (self._way, unit // BLOCK, gate * BLOCK + unit % BLOCK)
        if self._weight_sums is not None:
            zero = self._range[_ZERO].astype("int32")
            total = (total - zero * self._weight_sums[at]).astype("float32")
        factor = self._range[_SCALE] * self._scales[at]
        return self._of_input(gate, row, unit) + total * factor

    def _of_input(self, gate: int, row: Any, unit: Any) -> Any:
        """The part of the inputs in a gate's sum."""
        block = self._way * self._steps.blocks + unit // BLOCK
        column = (block * self._gate_count + gate) * BLOCK + unit % BLOCK
        return self._given[self._at, self._top + row, column]

    def _lstm(self, gate: Mapping[int, Any], row: Any, unit: Any) -> None:
        f, g, h = (FUNCTIONS[name] for name in self._steps.functions)
        old, new = (self._cell[place, row, unit] for place in (self._old, self._new))

        def peep(number: int, cell: Any) -> Any:
            value = gate[number]
            if self._peepholes is None:
                return value
            return value + self._peepholes[self._way, number * self._steps.wide + unit] * cell

        value = f(peep(2, old)) * old + f(peep(0, old)) * g(gate[3])
        T.buffer_store(self._cell, value, [self._new, row, unit])
        self._write(f(peep(1, new)) * h(new), row, unit)

    def _reset_gates(self, gate: Mapping[int, Any], row: Any, unit: Any) -> None:
        function = FUNCTIONS[self._steps.functions[0]]
        T.buffer_store(self._reset, function(gate[0]), [0, row, unit])
        reset = function(gate[1]) * self._state[self._old, row, unit]
        T.buffer_store(self._reset, reset, [1, row, unit])

    def _gru(self, gate: Mapping[int, Any], row: Any, unit: Any) -> None:
        f, g = (FUNCTIONS[name] for name in self._steps.functions)
        value, old = gate[2], self._state[self._old, row, unit]
        if self._kept is not None:
            value = self._of_input(2, row, unit) + f(gate[1]) * value
            T.buffer_store(self._reset, f(gate[0]), [0, row, unit])
        update = self._reset[0, row, unit]
        self._write((tirx.const(1.0, "float32") - update) * g(value) + update * old, row, unit)

    def _rnn(self, gate: Mapping[int, Any], row: Any, unit: Any) -> None:
        self._write(FUNCTIONS[self._steps.functions[0]](gate[0]), row, unit)

    def _write(self, value: Any, row: Any, unit: Any) -> None:
        """Write a unit's state, and its answer."""
        T.buffer_store(self._state, value, [self._new, row, unit])
        answer = self._state[self._new, row, unit]
        T.buffer_store(self._answers, answer, [self._at, self._way, self._top + row, unit])

    def _each(self, write: Callable[[Any], None]) -> None:
        """Write something for all units, in vectors."""
        parts = self._steps.wide // self._lanes
        with T.serial(0, parts) as part, T.vectorized(0, self._lanes) as lane:
            write(part * self._lanes + lane)
