"""Writes a model with our kernels, whose tensors are in the forms that kernels read. Imports TVM.

Each value is written in the form that its maker has (`forms.py`); readers convert it. The type is a
fact of a tensor: bytes where whole numbers are recognised, bfloat16 where it may be stored so
(`bf16_storage.py`), else its own.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import numpy as np
import tvm
from tvm import relax

from tuna.configs import ConvConfig
from tuna.configs.task import RESIDUAL, TaskConfig
from tuna.libraries.tvm.kernels import machine, signature
from tuna.libraries.tvm.kernels.types import TYPES
from tuna_models.compiler import block_operators, channels_last, elementwise, recurrent_calls
from tuna_models.compiler.bf16_storage import MOVING
from tuna_models.compiler.block_operators import BlockFunction
from tuna_models.compiler.blocked import BF16, BYTE, FP32, blocked_extents
from tuna_models.compiler.byte_operators import ByteOperators
from tuna_models.compiler.forms import (
    BLOCKS,
    BYTE_BLOCKS,
    BYTES,
    NARROW,
    NARROW_BLOCKS,
    OWN,
    PLAIN,
    Forms,
    TensorForm,
    Writer,
)
from tuna_models.compiler.graph import (
    RESHAPES,
    Node,
    constant_of,
    extents,
    needed,
    substitute,
    variables,
)
from tuna_models.compiler.groups import ZEROED, FusionGroup
from tuna_models.compiler.integer_groups import IntegerGroups
from tuna_models.compiler.kernel_arguments import Chosen, Group, answer_extents, arguments
from tuna_models.compiler.passes import Analysis
from tuna_models.compiler.segments import Form

#: Operators that read images in blocks
_READ_BLOCKS = {"nn.conv2d", *block_operators.FINDERS}
#: Operators whose values are some of those of an image
_OF_IMAGES = {"nn.max_pool2d": block_operators.max_pool, "image.resize2d": block_operators.resized}


class Emitter:
    """One model, written once by `run`."""

    def __init__(
        self, analysis: Analysis, kernel: Callable[..., Chosen | None], form: Form = Form.MODEL
    ):
        """`kernel` gives the kernel of a task, None to leave it to TVM; with `exact=True` one whose
        sums of whole numbers are whole numbers.

        In a `form` for checks the module returns its results and the values of the cuts one after
        the other. In segments it takes them after the parameters, and reads these in their places.
        """
        shipped, groups = form is Form.MODEL, analysis.groups
        bytes_of = analysis.integers if shipped else analysis.integers.apart()
        if not bytes_of.groups:
            bytes_of = IntegerGroups()
        self._graph, self._kernel, self._block = analysis.graph, kernel, analysis.block
        self._machine = machine.from_target(analysis.target)
        self._storage, self._integers = analysis.storage, bytes_of.integers
        self._writer = Writer(analysis.functions, self._machine.cores)
        may_round = self._storage.may_round if self._storage else lambda _: True
        self._forms = Forms(self._writer, self._block, self._integers, may_round)
        every: list[Group] = [*groups, *bytes_of.groups]
        self._groups = {group.answer: group for group in every}
        self._pairs = {pair.answer: pair for pair in bytes_of.pairs}
        self._tables = {table.answer: table for table in bytes_of.tables}
        self._inside = {node.var for group in groups for node in group.nodes} | bytes_of.taken
        cuts = () if shipped and not analysis.tuned else analysis.cuts
        #: variables whose values are rounded, whatever reads them
        self._real = {cut.var for cut in cuts if cut.scale is not None} if shipped else set[Any]()
        self._cuts = {
            cut.var: relax.Var(f"cut{place}", cut.var.ty)
            for place, cut in enumerate(() if shipped else cuts)
        }
        self._segments, self._ends = form is Form.SEGMENTS, dict[Any, Any]()
        self._bytes = ByteOperators(self._graph, self._forms, self._machine.look_up)
        self.calls = self._writer.calls

    def run(self) -> tvm.IRModule:
        """The module, whose function `main` has the model's parameters and results."""
        builder = self._writer.builder
        for param in self._graph.params:
            self._forms.values[param, PLAIN] = param
        with builder.function("main", [*self._graph.params, *self._taken()]):
            with builder.dataflow():
                results = relax.Tuple([self._graph.result, *self._cuts])
                sources = {answer: table.source for answer, table in self._tables.items()}
                for node in needed(self._graph.nodes, results, sources):
                    self._emit(node)
                    if node.var in self._cuts:
                        self._cut(node.var)
                result = substitute(self._graph.result, self._leaf)
                if self._cuts:
                    result = relax.Tuple([result, *(self._ends[var] for var in self._cuts)])
                result = builder.emit_output(result)
            builder.emit_func_output(result)
        return builder.finalize()

    def _taken(self) -> list[Any]:
        """Parameters after those of the model."""
        return list(self._cuts.values()) if self._segments else []

    def _emit(self, node: Node) -> None:
        var, group = node.var, self._groups.get(node.var)
        if group is not None:
            if not self._kernel_call(group):
                for member in group.nodes:
                    self._operator(member)
        elif var in self._tables:
            self._bytes.look_up(self._tables[var])
        elif var in self._pairs:
            self._bytes.pair(self._pairs[var])
        elif var in self._integers.moving:
            self._move_bytes(node)
        elif (written := self._bytes.operator(node)) is not None:
            self._inside |= written
        elif var not in self._inside and var not in self._forms.derived:
            self._operator(node)
            if self._integers.bases.get(var) is var:
                self._forms.store(var)

    def _cut(self, var: Any) -> None:
        """End a segment, so that TVM fuses nothing across; the next reads what it is given, in the
        same form."""
        forms, has_byte_blocks = self._forms, self._forms.has_byte_blocks(var)
        self._ends[var] = forms.get(var, PLAIN)
        if not self._segments:
            return
        forms.replace(var, self._cuts[var])
        self._cut_centered(var)
        if var in self._integers.bases:
            forms.replace_bytes(var, self._cuts[var], in_blocks=has_byte_blocks)

    def _cut_centered(self, var: Any) -> None:
        """Make the whole numbers that real values are multiples of from what a segment is given,
        where sums of whole numbers read these."""
        real = self._graph.quantisations.get(var)
        if real is None or real.kind or real.zero is None:
            return
        centered = real.vars[-2]
        if len(self._graph.users.get(centered, ())) > 1:
            quotient = self._writer.emit(relax.op.divide(self._cuts[var], real.scale))
            self._forms.replace(centered, self._writer.emit(relax.op.round(quotient)))

    def _kernel_call(self, group: Group) -> bool:
        """Call the kernel of a group, if there is one."""
        group, chosen = self._with_kernel(group)
        if chosen is None:
            return False
        core, task, shape = group.core, group.task, extents(group.answer)
        assert shape is not None
        key = task.key, group.exact, chosen.function
        function = self._writer.add(key, lambda: chosen.function, name_of(task), task)
        args = arguments(group, chosen, self._forms)
        kind = signature.answer_type(task.epilogue, TYPES[core.data_type])
        stored = kind if kind in (BYTE, BF16) and kind != str(group.answer.ty.dtype) else OWN
        form = TensorForm(isinstance(core, ConvConfig), stored)
        if chosen.shape is not None:
            value = self._called(group, function, args, chosen.shape.native_answer(), kind)
            if chosen.shape.interleaved != (1, 1):
                form = form._replace(in_blocks=not chosen.shape.planar)
                sizes = blocked_extents(shape, self._block) if form.in_blocks else shape
                value = self._writer.shaped(value, sizes)
            residual = self._forms.bounds.get(group.added.get(RESIDUAL), 0.0)
            self._forms.bounds[group.answer] = max(1.0, residual)
        else:
            value = self._called(group, function, args, answer_extents(core), kind)
            value = self._writer.shaped(value, shape)
            if ZEROED in group.added:
                condition, zero = self._leaf(group.added[ZEROED]), relax.const(0.0, kind)
                value = self._writer.emit(relax.op.where(condition, zero, value))
        self._forms.values[group.answer, form] = value
        if form.type == BYTE:
            self._forms.derive(group.answer)
        return True

    def _called(self, _group: Group, function: Any, args: list[Any], *answer: Any) -> Any:
        """The answer of a group's kernel, of this shape and type."""
        return self._writer.call(function, args, *answer)

    def _with_kernel(self, group: Group) -> tuple[Group, Chosen | None]:
        """The group in bf16, if it may be and has a kernel, else as it is; and its kernel."""
        storage = self._storage
        if isinstance(group, FusionGroup) and storage and not storage.leaves(group.answer):
            in_bf16 = storage.in_bf16(group)
            if in_bf16 is not None:
                chosen = self._kernel(in_bf16.task, exact=in_bf16.exact)
                if chosen is not None:
                    return in_bf16, chosen
        return group, self._kernel(group.task, exact=group.exact)

    def _move_bytes(self, node: Node) -> None:
        """Write an operator that moves bytes."""
        shape, find, function = extents(node.var), _OF_IMAGES.get(node.op), None
        assert shape is not None
        if find is not None:
            function = find(node, shape, self._block)
        elif node.op in ("", "strided_slice"):
            function = block_operators.find(node, self._graph, self._block)
        if function is not None and (find or self._reads_blocks(function.sources)):
            self._forms.values[node.var, BYTE_BLOCKS] = self._block_call(function, shape, BYTE)
        else:
            self._move(node, BYTES)
        self._forms.derive(node.var)

    def _move(self, node: Node, form: TensorForm) -> None:
        """Write an operator that moves values as they are stored in the model's own layout."""
        shape, emit = extents(node.var), self._writer.emit

        def stored(leaf: Any) -> Any:
            return self._forms.get(leaf, form) if isinstance(leaf, relax.Var) else leaf

        if node.op in RESHAPES and shape is not None:
            value = self._writer.shaped(stored(node.args[0]), shape)
        elif isinstance(node.value, relax.TupleGetItem) and form == BYTES:
            split = self._graph.makers[node.value.tuple_value]
            parts = emit(substitute(split.value, stored))
            value = emit(relax.TupleGetItem(parts, int(node.value.index)))
        else:
            value = emit(substitute(node.value, stored))
        self._forms.values[node.var, form] = value

    def _operator(self, node: Node) -> None:
        """Write an operator in blocks if an input is in blocks and the operator supports it."""
        if self._enters_blocks(node):
            return
        if self._moves_narrow(node):
            self._move(node, NARROW)
            return
        if self._in_blocks(node):
            return
        shape = extents(node.var)
        if node.op in RESHAPES and shape is not None:
            value = self._writer.shaped(substitute(node.args[0], self._leaf), shape)
            self._forms.values[node.var, PLAIN] = value
            return
        value = substitute(node.value, self._leaf)
        if node.op == "call_tir":  # a function that TVM's importer, or `recurrent_calls`, wrote
            called, operands = value.args
            function, name = self._graph.functions[called], called.name_hint
            product = recurrent_calls.product_of(node, self._graph.functions)
            if product is not None:
                function, values = self._steps(function, product, operands.fields)
                operands = relax.Tuple(values)
            called = self._writer.builder.add_func(function, name)
            value = tvm.ir.Call(value.op, [called, operands], value.attrs, value.ty_args)
        self._forms.values[node.var, PLAIN] = self._fenced(node.var, self._writer.emit(value))

    def _steps(
        self, function: Any, product: Any, operands: Sequence[Any]
    ) -> tuple[Any, Sequence[Any]]:
        """The function of a recurrent layer's steps, which read a `product`, and its operands."""
        in_bf16 = self._storage is not None and not self._storage.leaves(product)
        return recurrent_calls.specialised(function, operands, self._machine, in_bf16=in_bf16)

    def _enters_blocks(self, node: Node) -> bool:
        """Write images in blocks that are made of rows of channels, if what reads them does."""
        function = channels_last.into_blocks(node, self._graph, self._block, _READ_BLOCKS)
        if function is None or node.var in self._cuts or not self._groups:
            return False
        (source,), shape, forms = function.sources, extents(node.var), self._forms
        assert shape is not None
        is_narrow = (source, NARROW) in forms.values and forms.may_round(source)
        form = NARROW_BLOCKS if is_narrow else BLOCKS
        rows = (shape[0], *shape[2:], shape[1] // self._block, self._block)
        value = self._writer.shaped(forms.get(source, NARROW if is_narrow else PLAIN), rows)
        forms.values[node.var, form] = self._block_call(function, shape, form.type, [value])
        forms.bounds[node.var] = 0.0
        return True

    def _moves_narrow(self, node: Node) -> bool:
        """Whether an operator moves values that are bfloat16 in the model's layout."""
        sources = variables(node.value)
        if isinstance(node.value, relax.TupleGetItem):
            return (node.value.tuple_value, NARROW) in self._forms.values
        if node.op not in MOVING or not sources or any(map(_is_constant_tensor, node.args)):
            return False
        forms, values = self._forms, self._forms.values
        return all(
            (x, NARROW) in values and (x, PLAIN) not in values and forms.may_round(x)
            for x in sources
        )

    def _in_blocks(self, node: Node) -> bool:
        """Write an operator in blocks, if an input is there and the operator supports it."""
        pointwise = elementwise.find(node, self._graph.makers, self._block)
        if pointwise is not None:
            bound = pointwise.bound(self._forms.bounds)
            if not self._reads_blocks(pointwise.sources) or bound > elementwise.LARGEST:
                return False
            value = pointwise.write(
                self._writer.emit, self._operand, lambda var: self._forms.get(var, BLOCKS)
            )
            self._forms.values[node.var, BLOCKS] = self._fenced(node.var, value)
            self._forms.bounds[node.var] = bound
            return True
        function = block_operators.find(
            node, self._graph, self._block
        ) or channels_last.out_of_blocks(node, self._graph, self._block)
        shape = extents(node.var)
        if function is None or shape is None or not self._reads_blocks(function.sources):
            return False
        storage, bounds = self._storage, self._forms.bounds
        narrow = storage is not None and all(map(storage.may_round, function.sources))
        form = NARROW_BLOCKS if narrow else BLOCKS
        value = self._block_call(function, shape, form.type)
        if function.plain is not None:
            form = NARROW if narrow and function.keeps else PLAIN
            self._forms.values[node.var, form] = self._writer.shaped(value, shape)
        else:
            self._forms.values[node.var, form] = value
            bounds[node.var] = max(bounds.get(var, 0.0) for var in function.sources)
        return True

    def _block_call(
        self, block: BlockFunction, shape: tuple[int, ...], kind: str, args: Sequence[Any] = ()
    ) -> Any:
        """Call a function on blocks for an answer of this shape, by default on its sources."""
        make = partial(block.make, kind=kind or FP32)
        function = self._writer.add((block.name, *block.key, kind), make, block.name)
        form = TensorForm(True, kind)
        args = [*args] or [self._forms.get(source, form) for source in block.sources]
        if block.plain is not None:
            kept = (block.keeps and kind) or FP32
            return self._writer.call(function, args, block.plain, kept)
        extended = blocked_extents(shape, self._block)
        return self._writer.call(function, args, extended, kind or FP32)

    def _leaf(self, leaf: Any) -> Any:
        """A variable or constant in the model's layout; of bytes for this reader alone."""
        is_var = isinstance(leaf, relax.Var)
        return self._forms.read(leaf, PLAIN) if is_var else self._forms.leaf(leaf)

    def _operand(self, arg: Any) -> Any:
        """An argument of an operator on blocks."""
        if isinstance(arg, relax.Var):
            return self._forms.read(arg, BLOCKS)
        values = constant_of(arg)
        return arg if values is None else elementwise.constant_in_blocks(values, self._block)

    def _fenced(self, var: Any, value: Any) -> Any:
        """The value of a variable; see `small_functions.fence`."""
        return self._writer.fenced(value) if var in self._real else value

    def _reads_blocks(self, args: Sequence[Any]) -> bool:
        return any(isinstance(arg, relax.Var) and self._forms.in_blocks(arg) for arg in args)


def name_of(task: TaskConfig) -> str:
    """The name of a task's function."""
    kind = "conv" if isinstance(task.core, ConvConfig) else str(getattr(task.core, "kind", ""))
    return "_".join([kind, *task.epilogue])


def _is_constant_tensor(arg: Any) -> bool:
    parts = getattr(arg, "fields", [arg])
    arrays = [constant_of(part) for part in parts]
    return any(values is not None and values.dtype == np.float32 for values in arrays)
