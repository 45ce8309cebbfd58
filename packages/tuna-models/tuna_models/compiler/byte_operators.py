"""Writes operators that read bytes and write bytes, by functions between kernels. Imports TVM."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from functools import partial
from typing import Any

import numpy as np
import tvm
from tvm import relax

from tuna.libraries.tvm.kernels.look_up import ENTRIES, LookUp
from tuna_models.compiler import block_operators, byte_functions, elementwise, whole_sums
from tuna_models.compiler.blocked import BYTE, FP32, blocked_extents
from tuna_models.compiler.forms import (
    BLOCKS,
    BYTE_BLOCKS,
    BYTES,
    PLAIN,
    Forms,
    TensorForm,
    as_bytes,
)
from tuna_models.compiler.graph import Graph, Node, constant_of, extents
from tuna_models.compiler.integer_groups import Addition, Multiplication, Pair, Rounded, Table
from tuna_models.compiler.integers import Rounding

#: Names and functions of sums and products of two tensors
_PAIRS: Mapping[type, tuple[str, Callable[..., Any]]] = {
    Addition: ("byte_sum", byte_functions.rounded_sum),
    Multiplication: ("byte_product", byte_functions.rounded_product),
}


class ByteOperators:
    """Those of a model that is being written."""

    def __init__(self, graph: Graph, forms: Forms, look_up: LookUp | None) -> None:
        """`look_up`: the target's instruction for tables."""
        self._graph, self._forms, self._look_up = graph, forms, look_up
        self._block, self._writer, self._integers = forms.block, forms.writer, forms.integers

    def pair(self, pair: Pair) -> None:
        """Write a sum or a product of two tensors."""
        given = [pair.first, pair.second]
        form = self._form(pair.answer, *given)
        sizes = [self._extents(var, form) for var in given]
        args = [*(self._forms.get(var, form) for var in given), _scalars(pair.scalars)]
        name, make = _PAIRS[type(pair)]
        value = self._called(name, partial(make, *sizes), args, sizes[0])
        self._store(pair.answer, form, value)

    def look_up(self, table: Table) -> None:
        """Write a function of one tensor."""
        form = self._form(table.answer, table.source)
        stored = self._forms.get(table.source, form)
        self._store(table.answer, form, self._looked_up(stored, table.entries))

    def operator(self, node: Node) -> set[Any] | None:
        """Write an operator, or the rounding behind it; returns variables that need no operators
        any more, None for an operator that is not of bytes."""
        if node.op == "mean":
            return self._mean(node)
        return self._concat(node) if node.op == "concat" else None

    def _concat(self, node: Node) -> set[Any] | None:
        """Channels put together that are rounded behind, each tensor before."""
        rounding, shape = self._rounding(node), extents(node.var)
        function = block_operators.find(node, self._graph, self._block)
        if rounding is None or function is None or shape is None:
            return None
        if not any(map(self._forms.in_blocks, function.sources)):
            return None
        parts = [self._part(source, rounding) for source in function.sources]
        make = partial(function.make, kind=BYTE)
        call = self._writer.add((function.name, *function.key, BYTE), make, function.name)
        value = self._writer.call(call, parts, blocked_extents(shape, self._block), BYTE)
        *before, last = rounding.nodes
        self._store(last.var, BYTE_BLOCKS, value)
        return {each.var for each in before}

    def _part(self, source: Any, rounding: Rounding) -> Any:
        """The bytes in blocks of real values that are rounded."""
        grid = self._integers.grids.get(source)
        if grid is not None:
            stored = self._forms.get(source, BYTE_BLOCKS)
            if grid == rounding.grid:
                return stored
            every = np.arange(ENTRIES, dtype=np.uint8)
            return self._looked_up(stored, rounding.grid.stored(grid.real(every)))
        value = self._forms.read(source, BLOCKS)
        for each in rounding.nodes:
            args = [value, *map(self._operand, each.args[1:])]
            call = tvm.ir.Call(each.value.op, args, each.value.attrs, each.value.ty_args)
            value = self._writer.emit(call)
        return as_bytes(self._forms, rounding.nodes[-1].var, value)

    def _operand(self, arg: Any) -> Any:
        values = constant_of(arg)
        return arg if values is None else elementwise.constant_in_blocks(values, self._block)

    def _mean(self, node: Node) -> set[Any] | None:
        """The mean of images, rounded, or its real values and quotients by scales of roundings."""
        source, shape = node.args[0], extents(node.var)
        grid, base = self._integers.grids.get(source), self._integers.bases.get(source)
        if grid is None or shape is None or (base, BYTE_BLOCKS) not in self._forms.values:
            return None
        function = block_operators.mean(node, shape, self._block)
        if function is None:
            return None
        stored, count = self._forms.get(source, BYTE_BLOCKS), math.prod(self._extents(source)[2:])
        zero = count * grid.stored_zero
        reads = whole_sums.multiples(node.var, grid, self._graph.users, self._integers)
        factors = {var: factor / count for var, factor in reads.items()}
        rounding = self._rounding(node)
        if rounding is not None and len(shape) == 4:
            *before, last = rounding.nodes
            numbers = Rounded(rounding.grid, 0.0, 255.0).numbers
            scalars = byte_functions.mean_scalars(zero, factors[rounding.nodes[0].var], numbers)
            make = partial(byte_functions.rounded_mean, self._extents(stored))
            sizes = blocked_extents(shape, self._block)
            value = self._called("byte_mean", make, [stored, _scalars(scalars)], sizes)
            self._store(last.var, BYTE_BLOCKS, value)
            return {each.var for each in before}
        make = partial(function.make, kind=BYTE)
        call = self._writer.add((function.name, *function.key, BYTE), make, function.name)
        op, emit = relax.op, self._writer.emit
        total = self._writer.call(call, [stored], function.plain)
        centered = emit(op.subtract(total, relax.const(zero, FP32)))
        for var, factor in factors.items():
            multiplied = emit(op.multiply(centered, relax.const(factor, FP32)))
            self._forms.values[var, PLAIN] = self._writer.shaped(multiplied, shape)
        return {*factors}

    def _rounding(self, node: Node) -> Rounding | None:
        """The rounding that alone reads an operator's values."""
        user = self._graph.sole_user(node.var)
        return None if user is None else self._integers.roundings.get(user.var)

    def _looked_up(self, stored: Any, entries: Any) -> Any:
        table, sizes = relax.const(entries.astype(np.uint8)), self._extents(stored)
        make = partial(byte_functions.table, sizes, self._look_up)
        return self._called("byte_table", make, [stored, table], sizes)

    def _called(self, name: str, make: partial[Any], args: list[Any], sizes: Any) -> Any:
        """The answer, of these sizes, of a function that is made of its arguments."""
        function = self._writer.add((name, *make.args), make, name)
        return self._writer.call(function, args, sizes, BYTE)

    def _form(self, answer: Any, *sources: Any) -> TensorForm:
        """The form of bytes in which `sources` are read and the answer is written."""
        bases = (self._integers.bases[var] for var in sources)
        in_blocks = any((base, BYTE_BLOCKS) in self._forms.values for base in bases)
        is_image = len(extents(answer) or ()) in elementwise.IMAGES
        return BYTE_BLOCKS if in_blocks and is_image else BYTES

    def _extents(self, var: Any, form: TensorForm = PLAIN) -> tuple[int, ...]:
        shape = extents(var)
        assert shape is not None
        return blocked_extents(shape, self._block) if form.in_blocks else shape

    def _store(self, answer: Any, form: TensorForm, value: Any) -> None:
        self._forms.values[answer, form] = value
        self._forms.derive(answer)


def _scalars(values: list[float]) -> Any:
    return relax.const(np.array(values, np.float32))
