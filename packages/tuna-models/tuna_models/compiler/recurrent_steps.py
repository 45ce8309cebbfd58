"""The steps of a recurrent layer, all of them and all directions in one function. Imports TVM.

    for direction, part of the batch:                                              parallel
        for step:
            for tile of units, forwards and backwards in turn:
                for tile of rows:
                    acc[rows][gates][units] = part of the inputs + H R             registers
                    H', C = gates of acc                                           L1

The weights R are read once a step for all rows of a tile. Where they fill a core's L2, every other
step reads them from the end, as those that it was left with are there still. States are there
twice, of the step before and of this one.

The importer writes the function for any CPU; `specialised` makes that of a target out of it.
"""

from __future__ import annotations

import itertools
import json
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import Any

import ml_dtypes
import numpy as np
from tvm import relax, te, tirx
from tvm.script.ir_builder import IRBuilder
from tvm.script.ir_builder import tirx as T  # noqa: N812 (as TVM names it)

from tuna.configs.values import DataType
from tuna.libraries.tvm.kernels import dots, epilogue, stages
from tuna.libraries.tvm.kernels.instructions import SETS
from tuna.libraries.tvm.kernels.machine import Machine
from tuna_models.compiler.blocked import opaque
from tuna_models.compiler.graph import Node, constant_of

#: Units of a block of weights, a multiple of any vector
BLOCK = 16
#: Numbers of gates by operator
GATES = {"LSTM": 4, "GRU": 3, "RNN": 1}
FUNCTIONS = {"sigmoid": tirx.sigmoid, "tanh": tirx.tanh, "relu": epilogue.TIR["relu"]}
_ATTRIBUTE = "tuna.recurrent"
#: Share of the registers that sums take, and the most vectors of units of a tile
_SUMS, _MAX_VECTORS = 0.75, 4


@dataclass(frozen=True)
class Steps:
    """A layer whose part of the inputs is computed. Arguments of its function: that part
    (steps, batch, directions x blocks x gates x BLOCK), weights (directions, blocks, units,
    gates x BLOCK), states (directions, batch, wide), bias of the reset gate's product
    (directions, wide), lengths (batch), peepholes (directions, 3 x wide); results: answers
    (steps, directions, batch, wide) and states."""

    kind: str
    length: int
    batch: int
    units: int  #: Size of the state
    reverse: tuple[bool, ...]  #: whether it begins at the end, by direction
    functions: tuple[str, ...]  #: of gates and state
    reset_after: bool  #: A GRU multiplies the state by its weights before it resets it
    ragged: bool  #: Rows of the batch have lengths of their own
    peepholes: bool

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


def call(builder: Any, steps: Steps, operands: Sequence[Any]) -> list[Any]:
    """The answers and last states of the layer in a module that is built."""
    generic = Machine(SETS[-1].width, SETS[-1].registers, 1 << 15, 1 << 19)
    function = _function(steps, generic, [(_shape(each), each.ty.dtype) for each in operands])
    function = function.with_attr(_ATTRIBUTE, json.dumps(asdict(steps)))
    types = [relax.TensorType(shape, "float32") for shape in steps.results]
    variable = builder.add_func(function, steps.kind.lower())
    results = builder.emit(relax.call_tir(variable, list(operands), types))
    return [builder.emit(relax.TupleGetItem(results, place)) for place in range(len(types))]


def product_of(node: Node, functions: Mapping[Any, Any]) -> Any:
    """The part of the inputs that an operator reads if it calls a function of steps."""
    if node.op != "call_tir" or not _is_steps(functions[node.args[0]]):
        return None
    return node.args[1].fields[0]


def _is_steps(function: Any) -> bool:
    return _ATTRIBUTE in (function.attrs or {})


def specialised(
    function: Any, operands: Sequence[Any], machine: Machine, *, in_bf16: bool
) -> tuple[Any, Sequence[Any]] | None:
    """The function for a machine and its operands, of one that `call` wrote; None for others. With
    `in_bf16` products are in bfloat16, if the weights are known."""
    if not _is_steps(function):
        return None
    known: dict[str, Any] = json.loads(str(function.attrs[_ATTRIBUTE]))
    lists = {name: tuple(known[name]) for name in ("reverse", "functions")}
    steps = Steps(**known | lists)
    product, weights, *others = operands
    values = constant_of(weights) if in_bf16 else None
    if values is not None:
        weights = relax.const(_words(values))
    operands = [product, weights, *others]
    kinds = [(_shape(each), str(each.ty.dtype)) for each in operands]
    return _function(steps, machine, kinds), operands


def _words(weights: np.ndarray) -> np.ndarray:
    """Weights as words of two bfloat16 of adjacent units."""
    even = np.pad(weights, [(0, 0), (0, 0), (0, weights.shape[2] % 2), (0, 0)])
    bits = even.astype(ml_dtypes.bfloat16).view(np.uint16).astype(np.uint32)
    return (bits[:, :, ::2] | bits[:, :, 1::2] << 16).view(np.int32)


def _shape(value: Any) -> tuple[int, ...]:
    return tuple(int(extent) for extent in value.ty.shape.values)


def _function(
    steps: Steps, machine: Machine, operands: Sequence[tuple[tuple[int, ...], str]]
) -> Any:
    tensors = [
        te.placeholder(shape, kind, f"in{place}") for place, (shape, kind) in enumerate(operands)
    ]
    outs = [tirx.decl_buffer(shape, "float32", f"out{n}") for n, shape in enumerate(steps.results)]

    def body(ins: Sequence[Any], outs: Sequence[Any]) -> Any:
        with IRBuilder() as ib:
            _Body(steps, machine, ins, outs).write()
        return ib.get()

    kinds = ["float32"] * len(outs)
    name = steps.kind.lower()
    results = te.extern(steps.results, tensors, body, dtype=kinds, out_buffers=outs, name=name)
    return opaque(stages.module_of([*tensors, *results])["main"])


class _Body:
    """The statements of the steps, written in the order in which they run."""

    def __init__(
        self, steps: Steps, machine: Machine, ins: Sequence[Any], outs: Sequence[Any]
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
        in_bf16 = str(self._weights.dtype) == "int32"
        self._dot = machine.dot_of(DataType.BF16) if in_bf16 else None
        most = steps.batch if steps.ragged else max(1, machine.cores // len(steps.reverse))
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
            if self._dot:
                self._read = T.alloc_buffer([2, rows, steps.wide], self._dot.reads)
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
            self._round(self._state, 0, row)

    def _end(self, end: Any, row: Any, at: Any) -> None:
        """Copy the last states."""
        for own, last in zip(self._own, self._states, strict=True):
            T.buffer_store(last, own[end % 2, row, at], [self._way, self._top + row, at])

    def _round(self, source: Any, place: Any, row: Any) -> None:
        """Write a state as the product reads it."""
        if self._dot is None:
            return
        rounding = self._dot.rounding

        def write(at: Any) -> None:
            value = epilogue.rounded(source[place, row, at], "bfloat16", rounding)
            T.buffer_store(self._read, tirx.reinterpret("uint16", value), [place, row, at])

        self._each(write)

    def _step(self, number: Any, at: Any) -> None:
        steps = self._steps
        self._at = at
        if steps.kind == "GRU" and not steps.reset_after:
            self._product(number, [0, 1], self._state, self._old, self._reset_gates)
            with T.serial(0, self._rows) as row:
                self._round(self._reset, 1, row)
            self._product(number, [2], self._reset, 1, self._gru)
        else:
            unit = {"LSTM": self._lstm, "GRU": self._gru, "RNN": self._rnn}[steps.kind]
            self._product(number, range(self._gate_count), self._state, self._old, unit)
        with T.serial(0, self._rows) as row:
            self._round(self._state, self._new, row)

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
            sums = {at: T.alloc_buffer([self._lanes], "float32", scope="local") for at in places}
            self._sum(sums, row, tile * width, source, place)
            for r, v in itertools.product(range(rows), range(width)):
                with T.vectorized(0, self._lanes) as lane:
                    unit = (tile * width + v) * self._lanes + lane
                    of_gate = {gate: sums[r, gate, v][lane] for gate in gates}
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
                        value = buffer[lane] + source[place, row + r, unit] * weight
                        T.buffer_store(buffer, value, [lane])
            return
        word, lanes, whole = self._dot.word, self._lanes, tirx.Ramp(0, 1, self._lanes)
        with T.attr(0, "pragma_import_llvm", self._dot.text):
            with T.serial(0, -(-self._steps.units // word)) as step:
                for (r, gate, v), buffer in sums.items():
                    block, first = column(gate, v)
                    state = [place, row + r, tirx.Ramp(step * word, 1, word)]
                    shared = tirx.reinterpret("int32", tirx.BufferLoad(self._read, state))
                    at = [self._way, block, step, tirx.Ramp(first, 1, lanes)]
                    weights = tirx.BufferLoad(self._weights, at)
                    old = tirx.BufferLoad(buffer, [whole])
                    value = dots.total(self._dot, old, tirx.Broadcast(shared, lanes), weights)
                    T.buffer_store(buffer, value, [whole])

    def _begin(self, gate: int, row: Any, unit: Any) -> Any:
        """The value that a sum begins with."""
        if gate == 2 and self._kept is not None:
            return self._kept[self._way, unit]
        return self._of_input(gate, row, unit)

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
