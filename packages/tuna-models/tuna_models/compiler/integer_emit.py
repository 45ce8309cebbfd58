"""Rewrites a quantised model with kernels for whole numbers: tensors between them are bytes.
Imports TVM.

Whole numbers have up to two more forms, bytes in the model's layout and in blocks of channels. What
other operators read, fp32, is made from these by each of them: what lies in memory are bytes.
"""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import tvm
from tvm import relax

from tuna.configs import ConvConfig, GemmConfig, TaskConfig
from tuna.configs.task import PRELU, RESIDUAL, SCALARS, START, arguments_of, pads
from tuna.libraries.tvm.kernels.packing import channels_in_blocks, column_blocks
from tuna.libraries.tvm.problems import packed
from tuna_models.compiler import block_operators, blocked, byte_functions, whole_sums
from tuna_models.compiler.elementwise import IMAGES
from tuna_models.compiler.emit import Chosen, Emitter, name_of
from tuna_models.compiler.fences import fence
from tuna_models.compiler.graph import RESHAPES, Graph, Node, extents
from tuna_models.compiler.groups import FusionGroup
from tuna_models.compiler.integer_groups import Addition, IntegerGroup, IntegerGroups
from tuna_models.compiler.segments import Cut, Form

_BYTES = "uint8"


class IntegerEmitter(Emitter):
    """One quantised model, written once by `run`."""

    def __init__(
        self,
        graph: Graph,
        found: IntegerGroups,
        groups: list[FusionGroup],
        kernel: Callable[[TaskConfig], Chosen | None],
        block: int,
        cuts: Sequence[Cut] = (),
        form: Form = Form.MODEL,
    ):
        """`found` are the groups of whole numbers, `groups` those in fp32; see `Emitter`."""
        super().__init__(graph, groups, kernel, block, cuts, form)
        self._integers = found.integers
        self._byte_groups = {group.answer: group for group in found.groups}
        self._additions = {addition.answer: addition for addition in found.additions}
        self._inside |= found.taken
        self._bytes: dict[Any, Any] = {}  #: by base, in the model's layout
        self._byte_blocks: dict[Any, Any] = {}
        self._of_bytes = {"mean": self._byte_mean, "concat": self._byte_concat}
        self._derived = set[Any]()  #: variables whose values are made from bytes
        self._aliases = defaultdict[Any, list[Any]](list)
        for var, base in found.integers.bases.items():
            self._aliases[base].append(var)

    def plain(self, var: Any) -> Any:
        """The value in the model's own layout and type."""
        if var in self._derived and var not in self._plain:
            self._plain[var] = self._from_bytes(var, self.bytes(var))
        return super().plain(var)

    def blocks(self, var: Any) -> Any:
        """The value in blocks of channels, in its own type."""
        if var in self._derived and var not in self._blocks:
            self._blocks[var] = self._from_bytes(var, self.byte_blocks(var))
        return super().blocks(var)

    def _leaf(self, leaf: Any) -> Any:
        if leaf in self._derived and leaf not in self._plain:
            return self._from_bytes(leaf, self.bytes(leaf))
        return super()._leaf(leaf)

    def _operand(self, arg: Any) -> Any:
        if arg in self._derived and arg not in self._blocks:
            return self._from_bytes(arg, self.byte_blocks(arg))
        return super()._operand(arg)

    def _kernel_plain(self, group: FusionGroup, leaf: Any) -> Any:
        return self.plain(leaf) if leaf in self._derived else super()._kernel_plain(group, leaf)

    def _reads_blocks(self, sources: Sequence[Any]) -> bool:
        return super()._reads_blocks(sources) or any(map(self._has_byte_blocks, sources))

    def _has_byte_blocks(self, var: Any) -> bool:
        """Whether values in fp32 are made from bytes in blocks of channels."""
        known = isinstance(var, relax.Var) and var in self._derived
        return known and self._integers.bases[var] in self._byte_blocks and _kind(var) == "float32"

    def bytes(self, var: Any) -> Any:
        """Whole numbers as bytes, in the model's own layout."""
        base = self._integers.bases[var]
        if base not in self._bytes:
            if base in self._byte_blocks:
                self._bytes[base] = self._from_blocks(base, self._byte_blocks[base], _BYTES)
            else:
                self._bytes[base] = self._as_bytes(base, self.plain(base))
        return self._bytes[base]

    def byte_blocks(self, var: Any) -> Any:
        """Whole numbers as bytes, in blocks of channels."""
        base = self._integers.bases[var]
        if base not in self._byte_blocks:
            if base in self._blocks and base not in self._bytes:
                self._byte_blocks[base] = self._as_bytes(base, self._blocks[base])
            else:
                self._byte_blocks[base] = self._to_blocks(base, self.bytes(base), _BYTES)
        return self._byte_blocks[base]

    def _as_bytes(self, base: Any, value: Any) -> Any:
        """Bytes of whole numbers in fp32, or of a type of eight bits."""
        signed, op, emit = self._integers.signed[base], relax.op, self._builder.emit
        if str(base.ty.dtype) == _BYTES:
            return value
        if str(base.ty.dtype) == "int8":
            value = emit(op.astype(value, "float32"))
        if signed:
            value = emit(op.add(value, relax.const(128.0, "float32")))
        return emit(op.astype(value, _BYTES))

    def _emit(self, node: Node) -> None:
        group, addition = self._byte_groups.get(node.var), self._additions.get(node.var)
        if group is not None:
            self._byte_group(group)
        elif addition is not None:
            self._byte_sum(addition)
        elif node.var in self._integers.moving and self._moved(node):
            self._derive(node.var)
        elif node.op in self._of_bytes and self._of_bytes[node.op](node):
            return
        elif node.var not in self._derived:
            super()._emit(node)
            if self._integers.bases.get(node.var) is node.var:
                self._store(node.var)

    def _store(self, base: Any) -> None:
        """Store whole numbers that operators in fp32 have made as bytes."""
        if base in self._blocks:
            self._byte_blocks[base] = self._as_bytes(base, self._blocks[base])
        elif base in self._plain:
            self._bytes[base] = self._as_bytes(base, self._plain[base])
        else:
            return  # a part of a group
        self._derive(base)

    def _cut(self, var: Any) -> None:
        base, read_in_blocks = self._integers.bases.get(var), self._has_byte_blocks(var)
        super()._cut(var)
        if not self._segments or base is None:
            return
        self._derived.discard(var)
        if read_in_blocks:
            self._blocks.pop(var, None)
            self.blocks(var)
        op, emit, grid = relax.op, self._builder.emit, self._integers.grids.get(var)
        value = self._plain[var]
        if grid is not None:
            value = emit(op.round(emit(op.divide(value, _scalar(grid.scale)))))
        offset = grid.stored_zero if grid else 128.0 * self._integers.signed[base]
        value = emit(op.astype(emit(op.add(value, _scalar(offset))), _BYTES))
        in_blocks = self._byte_blocks.pop(base, None) is not None
        self._bytes[base] = value
        if in_blocks:
            self._byte_blocks[base] = self._to_blocks(base, value, _BYTES)
        self._derive(base, but=var)

    def _derive(self, base: Any, but: Any = None) -> None:
        """Let the other forms of a base's bytes be made where they are read."""
        for var in self._aliases[base]:
            if but is not None and var.same_as(but):
                self._derived.discard(var)
                continue
            self._plain.pop(var, None)
            self._blocks.pop(var, None)
            self._derived.add(var)
            grid = self._integers.grids.get(var)
            self._fillers[var] = 256.0 * max(1.0, grid.scale if grid else 1.0)

    def _from_bytes(self, var: Any, value: Any) -> Any:
        """The values of a variable, in its own type, from bytes in either layout."""
        op, emit = relax.op, self._builder.emit
        kind, grid = _kind(var), self._integers.grids.get(var)
        if kind != _BYTES:
            signed = self._integers.signed[self._integers.bases[var]]
            value = emit(op.astype(value, "float32"))
            taken = 128.0 * signed if grid is None else grid.stored_zero
            value = emit(op.subtract(value, _scalar(taken))) if taken else value
        if grid is not None:
            multiplied = emit(op.multiply(value, _scalar(grid.scale)))
            value = self._builder.emit_te(fence, multiplied)
        return value if kind in (_BYTES, "float32") else emit(op.astype(value, kind))

    def _byte_group(self, group: IntegerGroup) -> None:
        chosen = self._kernel(group.task)
        assert chosen is not None
        assert chosen.pack is not None
        task, shape = group.task, extents(group.answer)
        assert shape is not None
        function = self._add(task.key, lambda: chosen.function, name_of(task), task)
        given = [self._byte_input(group, chosen), relax.const(chosen.pack(group.weights))]
        values = self._factors(group)
        for argument in arguments_of(task.epilogue, padded=pads(group.core)):
            if argument.role in (SCALARS.role, PRELU, RESIDUAL):
                values[argument.role] = self._added_value(group, argument.role)
            given.append(values[argument.role])
        kind = _BYTES if group.rounded else "float32"
        convolution = isinstance(group.core, ConvConfig)
        if isinstance(group.core, GemmConfig):
            rows = group.core.stored_shapes["c"]
            value = self._shaped(self._call(function, given, rows, kind), shape)
        else:
            assert chosen.shape is not None
            value = self._call(function, given, chosen.shape.native_output(), kind)
        if group.rounded is None:
            (self._blocks if convolution else self._plain)[group.answer] = value
            self._fillers[group.answer] = max(1.0, self._fillers.get(group.residual, 0.0))
            return
        (self._byte_blocks if convolution else self._bytes)[group.answer] = value
        self._derive(group.answer)

    def _added_value(self, group: IntegerGroup, role: str) -> Any:
        """The scalars, the slopes, or what is added to the answer: bytes or fp32."""
        core, in_blocks = group.core, isinstance(group.core, ConvConfig)
        if role == SCALARS.role:
            return self._scalars(group)
        if role == PRELU:
            return relax.const(self._channels(group.slopes) if in_blocks else group.slopes)
        if group.addition is not None:
            second = group.addition.second
            found = self.byte_blocks(second) if in_blocks else self.bytes(second)
        else:
            found = self.blocks(group.residual) if in_blocks else self.plain(group.residual)
        return (
            self._shaped(found, core.stored_shapes["c"]) if isinstance(core, GemmConfig) else found
        )

    def _byte_input(self, group: IntegerGroup, chosen: Chosen) -> Any:
        if isinstance(group.core, GemmConfig):
            return self._shaped(self.bytes(group.input), group.core.stored_shapes["a"])
        assert chosen.shape is not None
        sizes, window = chosen.shape.native_input(), group.window
        if window is not None:
            read = self.byte_blocks if window.blocked else self.bytes
            source = read(group.input), _BYTES, _BYTES
            return self._window(group.input, window, sizes, source, image=chosen.shape.image)
        if chosen.shape.image:
            return self._shaped(self.bytes(group.input), sizes)
        return self.byte_blocks(group.input)

    def _factors(self, group: IntegerGroup) -> dict[str, Any]:
        """Start, factor and offset, by role."""
        op, emit = relax.op, self._builder.emit
        if group.scale is None:
            start, *found = group.factors()
            if isinstance(group.core, ConvConfig):
                found = [self._channels(values) for values in found]
            return _of_dequantize(*map(relax.const, (self._starts(group, start), *found)))
        scale = self.plain(group.scale)
        shape = extents(group.scale)
        assert shape is not None
        columns = shape and shape[-1] > 1
        scale = self._shaped(scale, (shape[-1],) if columns else ())
        bias = np.zeros(len(group.scales)) if group.bias is None else group.bias
        factors = [group.scales.astype(np.float32), bias.astype(np.float32)]
        if isinstance(group.core, ConvConfig):
            factors = [self._channels(values) for values in factors]
        multiplied, added = (relax.const(values) for values in factors)
        start = self._dynamic_start(group)
        return _of_dequantize(start, emit(op.multiply(scale, multiplied)), added)

    def _dynamic_start(self, group: IntegerGroup) -> Any:
        """Z of a zero point that may be a variable."""
        sums = group.sums.astype(np.int32)
        if not isinstance(group.zero, relax.Var):
            return relax.const(self._starts(group, -int(group.zero) * sums))
        taken = relax.const(self._starts(group, -sums))
        return self._builder.emit(relax.op.multiply(self._stored_zero(group), taken))

    def _stored_zero(self, group: IntegerGroup) -> Any:
        """The byte that stands for zero, in int32, where that is known when the model runs."""
        signed = self._integers.signed[self._integers.bases[group.input]]
        zero, offset = self._shaped(self.plain(group.zero), ()), relax.const(128 * signed)
        return self._builder.emit(relax.op.add(zero, offset))

    def _scalars(self, group: IntegerGroup) -> Any:
        """P as the kernel takes it."""
        if not isinstance(group.zero, relax.Var):
            return relax.const(group.scalars())
        zero = self._builder.emit(relax.op.astype(self._stored_zero(group), "float32"))
        return self._shaped(zero, (1,))

    def _starts(self, group: IntegerGroup, values: Any) -> Any:
        """A whole number for each channel or column, in blocks."""
        if isinstance(group.core, ConvConfig):
            return self._channels(values)
        blocks = column_blocks(values.size, self._block)
        return packed(values, channels_in_blocks(blocks, self._block))

    def _byte_sum(self, addition: Addition) -> None:
        shape = extents(addition.answer)
        assert shape is not None
        pair = [self._integers.bases[var] for var in (addition.first, addition.second)]
        in_blocks = len(shape) in IMAGES and any(base in self._byte_blocks for base in pair)
        read = self.byte_blocks if in_blocks else self.bytes
        sizes = blocked.blocked_extents(shape, self._block) if in_blocks else shape
        function = self._add(
            ("byte_sum", sizes), lambda: byte_functions.addition(sizes), "byte_sum"
        )
        numbers = byte_functions.scalars(addition.grids[0].stored_zero, addition.numbers)
        scalars = relax.const(np.array(numbers, np.float32))
        given = [read(addition.first), read(addition.second), scalars]
        value = self._call(function, given, sizes, _BYTES)
        (self._byte_blocks if in_blocks else self._bytes)[addition.answer] = value
        self._derive(addition.answer)

    def _moved(self, node: Node) -> bool:
        """Emit an operator that moves bytes."""
        shape = extents(node.var)
        assert shape is not None
        if node.op in ("", "strided_slice"):
            self._cut_out(node, shape)
            return True
        source = node.args[0]
        if node.op in _OF_IMAGES:
            found = _OF_IMAGES[node.op](node, shape, self._block)
            assert found is not None
            function = self._of_blocks(found, _BYTES)
            sizes = blocked.blocked_extents(shape, self._block)
            read = self.byte_blocks(source)
            self._byte_blocks[node.var] = self._call(function, [read], sizes, _BYTES)
        elif node.op in RESHAPES:
            self._bytes[node.var] = self._shaped(self.bytes(source), shape)
        else:
            moved = relax.op.permute_dims(self.bytes(source), node.attrs.axes)
            self._bytes[node.var] = self._builder.emit(moved)
        return True

    def _cut_out(self, node: Node, shape: tuple[int, ...]) -> None:
        """Emit a part of bytes: a slice, or one of the parts of a split."""
        cut = node if node.op else self._graph.maker(node.value.tuple_value)
        assert cut is not None
        found = block_operators.find(node, self._graph, self._block)
        if found is not None and self._reads_blocks(found.sources):
            sizes = blocked.blocked_extents(shape, self._block)
            function = self._of_blocks(found, _BYTES)
            read = [self.byte_blocks(source) for source in found.sources]
            self._byte_blocks[node.var] = self._call(function, read, sizes, _BYTES)
            return
        args = [self.bytes(cut.args[0]), *cut.args[1:]]
        value = self._builder.emit(
            tvm.ir.Call(cut.value.op, args, cut.value.attrs, cut.value.ty_args)
        )
        if not node.op:
            value = self._builder.emit(relax.TupleGetItem(value, int(node.value.index)))
        self._bytes[node.var] = value

    def _byte_concat(self, node: Node) -> bool:
        """Emit channels put together that are rounded behind, each tensor before."""
        user = self._graph.sole_user(node.var)
        rounding = user and self._integers.roundings.get(user.var)
        found, shape = block_operators.find(node, self._graph, self._block), extents(node.var)
        if not rounding or not found or not shape or not self._reads_blocks(found.sources):
            return False
        *before, last = rounding.nodes
        parts = list[Any]()
        for source in found.sources:
            if self._integers.grids.get(source) == rounding.grid:
                parts.append(self.byte_blocks(source))
                continue
            value = self._operand(source)
            for each in rounding.nodes:
                args = [value, *map(self._operand, each.args[1:])]
                call = tvm.ir.Call(each.value.op, args, each.value.attrs, each.value.ty_args)
                value = self._builder.emit(call)
            parts.append(self._as_bytes(last.var, value))
        sizes = blocked.blocked_extents(shape, self._block)
        function = self._of_blocks(found, _BYTES)
        self._byte_blocks[last.var] = self._call(function, parts, sizes, _BYTES)
        self._inside |= {each.var for each in before}
        self._derive(last.var)
        return True

    def _byte_mean(self, node: Node) -> bool:
        """Emit the mean of images of bytes, and its quotients by the scales of roundings."""
        source, shape = node.args[0], extents(node.var)
        grid, base = self._integers.grids.get(source), self._integers.bases.get(source)
        if grid is None or base not in self._byte_blocks or shape is None:
            return False
        found = block_operators.mean(node, shape, self._block)
        if found is None:
            return False
        op, emit, function = relax.op, self._builder.emit, self._of_blocks(found, _BYTES)
        count = math.prod((extents(source) or ())[2:])
        total = self._call(function, [self._byte_blocks[base]], found.plain)
        centered = emit(op.subtract(total, _scalar(count * grid.stored_zero)))
        for read, factor in whole_sums.multiples(
            node.var, grid, self._graph, self._integers
        ).items():
            multiplied = emit(op.multiply(centered, _scalar(factor / count)))
            self._plain[read] = self._shaped(multiplied, shape)
            self._inside.add(read)
        return True


#: Operators whose values are some of those of an image
_OF_IMAGES = {"nn.max_pool2d": block_operators.max_pool, "image.resize2d": block_operators.resized}


def _of_dequantize(start: Any, factor: Any, offset: Any) -> dict[str, Any]:
    return {START.role: start, "factor": factor, "offset": offset}


def _kind(var: Any) -> str:
    return str(var.ty.dtype)


def _scalar(value: float) -> Any:
    return relax.const(value, "float32")
