"""Rewrites a model with our kernels, keeping tensors in blocks of channels. Imports TVM.

A value of the model has up to two forms, plain and in blocks, each made for its first reader.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import numpy as np
import tvm
from tvm import relax

from tuna.configs import ConvConfig, GemmConfig
from tuna.configs.task import TaskConfig
from tuna.libraries.tvm.kernels.epilogue import Epilogue
from tuna.libraries.tvm.kernels.packing import channels_in_blocks, in_blocks
from tuna.libraries.tvm.kernels.shape import ConvShape
from tuna.libraries.tvm.kernels.types import TYPES
from tuna.libraries.tvm.problems import packed
from tuna_models import block_operators, blocked, elementwise, fillers
from tuna_models.graph import (
    RESHAPES,
    Graph,
    Node,
    constant_of,
    extents,
    scale_and_shift,
    substitute,
)
from tuna_models.groups import FusionGroup
from tuna_models.segments import Cut


@dataclass(frozen=True)
class Chosen:
    """The kernel of a task."""

    function: Any  #: scheduled PrimFunc
    #: packs weights for it; None for a product of two variables
    pack: Callable[[Any], Any] | None
    shape: ConvShape | None  #: Shape of a convolution


class Emitter:
    """One model, written once by `run`."""

    def __init__(
        self,
        graph: Graph,
        groups: list[FusionGroup],
        kernel: Callable[[TaskConfig], Chosen | None],
        block: int,
        cuts: Sequence[Cut] = (),
        *,
        segments: bool = False,
    ):
        """`kernel` gives the kernel of a task, None to leave it to TVM.

        The module returns its results and the values of the `cuts` one after the other. With
        `segments` it takes them after the parameters, and reads these in their places.
        """
        self._graph, self._kernel, self._block = graph, kernel, block
        self._cuts = {
            cut.var: relax.Var(f"cut{place}", cut.var.ty) for place, cut in enumerate(cuts)
        }
        self._segments, self._ends = segments, dict[Any, Any]()
        self._plain: dict[Any, Any] = {}
        self._blocks: dict[Any, Any] = {}
        self._fillers: dict[Any, float] = {}  #: bounds of values beyond the channels
        self._functions: dict[Any, Any] = {}
        self._reshaped: dict[Any, Any] = {}  #: the source of each reshaped variable
        self._last = {group.answer: group for group in groups}
        self._inside = {node.var for group in groups for node in group.nodes}
        self._builder = relax.BlockBuilder()
        #: name and task of each function that is not TVM's own
        self.calls: list[tuple[str, TaskConfig | None]] = []

    def run(self) -> tvm.IRModule:
        """The module, whose function `main` has the model's parameters and results."""
        builder = self._builder
        for param in self._graph.params:
            self._plain[param] = param
        taken = self._cuts.values() if self._segments else ()
        with builder.function("main", [*self._graph.params, *taken]):
            with builder.dataflow():
                for node in self._graph.nodes:
                    self._emit(node)
                    if node.var in self._cuts:
                        self._cut(node.var)
                result = substitute(self._graph.result, self._leaf)
                if self._cuts:
                    result = relax.Tuple([result, *(self._ends[var] for var in self._cuts)])
                result = builder.emit_output(result)
            builder.emit_func_output(result)
        return builder.finalize()

    def _cut(self, var: Any) -> None:
        """End a segment, so that TVM fuses nothing across; the next reads what it is given, in the
        same layout."""
        self._ends[var] = self.plain(var)
        if self._segments:
            in_blocks = self._blocks.pop(var, None) is not None
            self._plain[var] = self._cuts[var]
            if in_blocks:
                self.blocks(var)

    def plain(self, var: Any) -> Any:
        """The value in the model's own layout."""
        if var not in self._plain:
            self._plain[var] = self._from_blocks(var, self._blocks[var], str(var.ty.dtype))
        return self._plain[var]

    def blocks(self, var: Any) -> Any:
        """The value in blocks of channels."""
        if var not in self._blocks:
            self._blocks[var] = self._to_blocks(var, self._plain[var], blocked.FP32)
        return self._blocks[var]

    def _from_blocks(self, var: Any, value: Any, kind: str, found: str = "") -> Any:
        """The value of a variable, blocks of type `kind`, in the model's layout; as type `found`,
        by default the same."""
        shape, found = extents(var), found or kind
        assert shape is not None
        make = partial(blocked.from_blocks, shape, self._block, kind, found)
        function = self._add(("unblock", shape, kind, found), make, "from_blocks")
        return self._call(function, [value], shape, found)

    def _to_blocks(self, var: Any, value: Any, kind: str, found: str = "") -> Any:
        """The value of a variable, in the model's layout and of type `kind`, in blocks; as type
        `found`, by default the same."""
        shape, found = extents(var), found or kind
        assert shape is not None
        make = partial(blocked.to_blocks, shape, self._block, kind, found)
        function = self._add(("block", shape, kind, found), make, "to_blocks")
        return self._call(function, [value], blocked.blocked_extents(shape, self._block), found)

    def _leaf(self, leaf: Any) -> Any:
        """Return a variable in the model's layout, or a constant.

        A constant without values is made when the model runs, because TVM would write a library
        that it refuses to load, unless the first extent is zero.
        """
        values = constant_of(leaf)
        if values is None:
            return self.plain(leaf)
        if values.size:
            return leaf
        return self._builder.emit(relax.op.zeros(values.shape, str(values.dtype)))

    def _emit(self, node: Node) -> None:
        group = self._last.get(node.var)
        if group is not None:
            chosen = self._kernel(group.task)
            if chosen is not None:
                self._kernel_call(group, chosen)
            else:
                for member in group.nodes:
                    self._operator(member)
        elif node.var not in self._inside:
            self._operator(node)

    def _kernel_call(self, group: FusionGroup, chosen: Chosen) -> None:
        task = group.task
        function = self._add(task.key, lambda: chosen.function, name_of(task), task)
        kind = Epilogue(tuple(group.epilogue)).answer_type(TYPES[group.core.data_type])
        if isinstance(group.core, GemmConfig):
            self._product_call(group, group.core, chosen, function, kind)
            return
        assert chosen.shape is not None
        assert chosen.pack is not None
        given = [self._read(group, chosen.shape), relax.const(chosen.pack(group.weights))]
        if group.bias is not None:
            given.append(relax.const(self._channels(group.bias)))
        if group.residual is not None:
            given.append(self._kernel_blocks(group, group.residual))
        value = self._call(function, given, chosen.shape.native_output(), kind)
        self._keep(group, value, kind)
        self._fillers[group.answer] = max(1.0, self._fillers.get(group.residual, 0.0))

    def _kernel_blocks(self, group: FusionGroup, var: Any) -> Any:
        """A value in blocks of channels, as the kernel of a group reads it."""
        return self.blocks(var)

    def _kernel_plain(self, group: FusionGroup, leaf: Any) -> Any:
        """A variable or constant in the model's layout, as the kernel of a group reads it."""
        return self._leaf(leaf)

    def _keep(self, group: FusionGroup, value: Any, kind: str) -> None:
        """Keep the answer of a group's kernel, of this type: a convolution's is in blocks."""
        forms = self._plain if isinstance(group.core, GemmConfig) else self._blocks
        forms[group.answer] = value

    def _read(self, group: FusionGroup, shape: ConvShape) -> Any:
        """The input of a convolution as its kernel takes it."""
        if group.window is not None:
            source, sizes = self._window_source(group, group.window), shape.native_input()
            return self._window(group.input, group.window, sizes, source, image=shape.image)
        if not shape.image:
            return self._kernel_blocks(group, group.input)
        return self._shaped(self._kernel_plain(group, group.input), shape.native_input())

    def _window_source(self, group: FusionGroup, window: blocked.Window) -> tuple[Any, str, str]:
        """What a window is copied from, its type, and the type of the copy."""
        read = self.blocks if window.blocked else self.plain
        return read(group.input), blocked.FP32, blocked.FP32

    def _window(
        self,
        var: Any,
        window: blocked.Window,
        sizes: tuple[int, ...],
        source: tuple[Any, str, str],
        *,
        image: bool,
    ) -> Any:
        """A copy of a window of a variable's value, with the extents `sizes`, in blocks or an
        image; `source` is as `_window_source` returns it."""
        shape, (value, kind, found) = extents(var), source
        assert shape is not None
        make = partial(
            blocked.window, shape, self._block, window, image=image, kind=kind, found=found
        )
        function = self._add(("window", shape, window, image, kind, found), make, "window")
        return self._call(function, [value], sizes, found)

    def _product_call(
        self, group: FusionGroup, core: GemmConfig, chosen: Chosen, function: Any, kind: str
    ) -> None:
        """Emit a product of matrices, with all leading axes as rows."""
        batch, found = ((core.batch_count,) if core.batch_count > 1 else ()), extents(group.answer)
        assert found is not None
        a, b, c = ((*batch, *sizes) for sizes in core.stored_shapes.values())
        if chosen.pack is None:
            other = self._kernel_plain(group, group.other)
            if group.order is not None and group.order != sorted(group.order):
                other = self._builder.emit(relax.op.permute_dims(other, group.order))
            second = self._shaped(other, b)
        else:
            second = relax.const(chosen.pack(group.weights))
        given = [self._shaped(self._kernel_plain(group, group.input), a), second]
        if group.bias is not None:
            given.append(relax.const(group.bias))
        if group.residual is not None:
            given.append(self._shaped(self._kernel_plain(group, group.residual), c))
        self._keep(group, self._shaped(self._call(function, given, c, kind), found), kind)

    def _operator(self, node: Node) -> None:
        """Emit an operator in blocks if an input is in blocks and the operator supports it."""
        if self._in_blocks(node):
            return
        shape = extents(node.var)
        if node.op in RESHAPES and shape is not None:
            self._plain[node.var] = self._shaped(substitute(node.args[0], self._leaf), shape)
            return
        value = substitute(node.value, self._leaf)
        if node.op == "call_tir":  # a function that TVM's importer, or `recurrent`, wrote
            called, *given = value.args
            function = self._builder.add_func(self._graph.functions[called], called.name_hint)
            value = tvm.ir.Call(value.op, [function, *given], value.attrs, value.ty_args)
        self._plain[node.var] = self._builder.emit(value)

    def _in_blocks(self, node: Node) -> bool:
        """Emit an operator in blocks, if an input is there and the operator supports it."""
        if isinstance(node.value, relax.TupleGetItem) and self._normalised(node):
            return True
        if elementwise.works(node, self._block):
            return self._reads_blocks(node.args) and self._elementwise(node)
        found, shape = block_operators.find(node, self._graph, self._block), extents(node.var)
        if found is None or shape is None or not self._reads_blocks(found.sources):
            return False
        self._block_function(node, found, shape)
        return True

    def _block_function(
        self, node: Node, found: block_operators.BlockFunction, shape: tuple[int, ...]
    ) -> None:
        """Emit the function on blocks of an operator."""
        function = self._of_blocks(found, blocked.FP32)
        sources = [self.blocks(source) for source in found.sources]
        if found.plain is None:
            extended = blocked.blocked_extents(shape, self._block)
            self._blocks[node.var] = self._call(function, sources, extended)
            self._fillers[node.var] = max(self._fillers.get(var, 0.0) for var in found.sources)
        else:
            self._plain[node.var] = self._shaped(self._call(function, sources, found.plain), shape)

    def _of_blocks(self, found: block_operators.BlockFunction, kind: str) -> Any:
        """The function on blocks of values of type `kind`."""
        make = partial(found.make, kind=kind)
        return self._add((found.name, *found.key, kind), make, found.name)

    def _normalised(self, node: Node) -> bool:
        """Emit a batch normalisation that is part of no convolution as a product and a sum."""
        maker, shape = self._graph.maker(node.value.tuple_value), extents(node.var)
        if maker is None or maker.op != "nn.batch_norm" or int(node.value.index) != 0:
            return False
        values = scale_and_shift(maker)
        if values is None or shape is None or len(shape) not in elementwise.IMAGES:
            return False
        if not self._reads_blocks(maker.args[:1]) or str(node.var.ty.dtype) != "float32":
            return False
        scale, shift = (
            self._operand(
                relax.const(each.astype(np.float32).reshape(1, -1, *[1] * (len(shape) - 2)))
            )
            for each in values
        )
        scaled = self._builder.emit(relax.op.multiply(self.blocks(maker.args[0]), scale))
        self._blocks[node.var] = self._builder.emit(relax.op.add(scaled, shift))
        self._fillers[node.var] = 0.0
        return True

    def _reads_blocks(self, sources: Sequence[Any]) -> bool:
        return any(isinstance(each, relax.Var) and each in self._blocks for each in sources)

    def _elementwise(self, node: Node) -> bool:
        shape = extents(node.var)
        if (
            shape is None
            or len(shape) not in elementwise.IMAGES
            or getattr(node.var.ty, "dtype", None) != "float32"
        ):
            return False
        if not all(elementwise.fits(arg, shape, self._block) for arg in node.args):
            return False
        filler = 0.0
        if shape[1] % self._block:
            filler = fillers.bound(node.op, [self._filler(arg) for arg in node.args])
            if filler > fillers.LARGEST:
                return False
        self._fillers[node.var] = filler
        args = [self._operand(arg) for arg in node.args]
        self._blocks[node.var] = self._builder.emit(
            tvm.ir.Call(node.value.op, args, node.value.attrs, node.value.ty_args)
        )
        return True

    def _filler(self, arg: Any) -> float:
        """The bound of an argument beyond the channels, where only single constants are not 0."""
        if isinstance(arg, relax.Var):
            return self._fillers.get(arg, 0.0)
        values = constant_of(arg)
        if values is not None:
            return float(abs(values.reshape(()))) if values.size == 1 else 0.0
        value = abs(float(getattr(arg, "value", 0.0)))  # a bound of a clip
        return value if value < math.inf else 0.0

    def _operand(self, arg: Any) -> Any:
        if isinstance(arg, relax.Var):
            return self.blocks(arg)
        values = constant_of(arg)
        if values is None:
            return arg
        if values.size == 1:
            return relax.const(values.reshape(()))
        extended = blocked.blocked_extents(values.shape, self._block)
        return relax.const(packed(blocked.images(values), in_blocks(extended)))

    def _channels(self, values: np.ndarray) -> Any:
        """A value for each channel as C/b, b."""
        blocks = -(-values.size // self._block)
        return packed(values.reshape(-1), channels_in_blocks(blocks, self._block))

    def _add(
        self, key: Any, make: Callable[[], Any], name: str, task: TaskConfig | None = None
    ) -> Any:
        if key not in self._functions:
            self._functions[key] = self._builder.add_func(blocked.opaque(make()), name)
        function = self._functions[key]
        self.calls.append((str(function.name_hint), task))
        return function

    def _shaped(self, value: Any, shape: tuple[int, ...]) -> Any:
        """Reshape the value, once for a chain of reshapes."""
        value = self._reshaped.get(value, value)
        if extents(value) == shape:
            return value
        found = self._builder.emit(relax.op.reshape(value, shape))
        self._reshaped[found] = value
        return found

    def _call(
        self, function: Any, args: list[Any], shape: tuple[int, ...] | None, kind: str = "float32"
    ) -> Any:
        assert shape is not None
        return self._builder.emit(relax.call_tir(function, args, relax.TensorType(shape, kind)))


def name_of(task: TaskConfig) -> str:
    kind = "conv" if isinstance(task.core, ConvConfig) else "gemm"
    return "_".join([kind, *task.epilogue])
