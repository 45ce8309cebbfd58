"""Rewrites a model with our kernels, keeping tensors in blocks of channels. Imports TVM."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import tvm
from tvm import relax

from tuna.configs import ConvConfig, GemmConfig
from tuna.configs.task import CHANNELS, Argument, TaskConfig, arguments_of, pads
from tuna.libraries.tvm.kernels import signature
from tuna.libraries.tvm.kernels.shape import ConvShape
from tuna.libraries.tvm.kernels.types import TYPES
from tuna_models.compiler import blocked
from tuna_models.compiler.block_emit import BlockEmitter
from tuna_models.compiler.graph import (
    RESHAPES,
    Graph,
    Node,
    constant_of,
    extents,
    substitute,
)
from tuna_models.compiler.groups import FusionGroup
from tuna_models.compiler.segments import Cut, Form


@dataclass(frozen=True)
class Chosen:
    """The kernel of a task."""

    function: Any  #: scheduled PrimFunc
    #: packs weights for it; None for a product of two variables
    pack: Callable[[Any], Any] | None
    shape: ConvShape | None  #: Shape of a convolution
    winograd: bool = False  #: True for Winograd's sums, which are right to fewer digits


class Emitter(BlockEmitter):
    """One model, written once by `run`."""

    def __init__(
        self,
        graph: Graph,
        groups: list[FusionGroup],
        kernel: Callable[..., Chosen | None],
        block: int,
        cuts: Sequence[Cut] = (),
        form: Form = Form.MODEL,
    ):
        """`kernel` gives the kernel of a task, None to leave it to TVM; with `exact=True` one whose
        sums of whole numbers are whole numbers.

        In a `form` for checks the module returns its results and the values of the `cuts` one
        after the other. In segments it takes them after the parameters, and reads these in their
        places.
        """
        shipped = form is Form.MODEL
        real = {cut.var for cut in cuts if cut.scale is not None}
        super().__init__(graph, block, real if shipped else set())
        self._kernel = kernel
        self._cuts = {
            cut.var: relax.Var(f"cut{place}", cut.var.ty)
            for place, cut in enumerate(() if shipped else cuts)
        }
        self._segments, self._ends = form is Form.SEGMENTS, dict[Any, Any]()
        self._last = {group.answer: group for group in groups}
        self._inside = {node.var for group in groups for node in group.nodes}

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
            self._cut_centered(var)

    def _cut_centered(self, var: Any) -> None:
        """Make the whole numbers that real values are multiples of from what a segment is given,
        where sums of whole numbers read these."""
        product = self._graph.maker(var)
        if product is None or product.op != "multiply":
            return
        centered, scale = product.args
        if constant_of(scale) is None or len(self._graph.users.get(centered, ())) < 2:
            return
        difference = self._graph.maker(centered)
        if difference is None or difference.op != "subtract":
            return
        in_blocks = self._blocks.pop(centered, None) is not None
        quotient = self._builder.emit(relax.op.divide(self._plain[var], scale))
        self._plain[centered] = self._builder.emit(relax.op.round(quotient))
        if in_blocks:
            self.blocks(centered)

    def _emit(self, node: Node) -> None:
        group = self._last.get(node.var)
        if group is not None:
            chosen = self._kernel(group.task, exact=group.exact)
            if chosen is not None:
                self._kernel_call(group, chosen)
            else:
                for member in group.nodes:
                    self._operator(member)
        elif node.var not in self._inside:
            self._operator(node)

    def _kernel_call(self, group: FusionGroup, chosen: Chosen) -> None:
        task = group.task
        key = task.key, group.exact
        function = self._add(key, lambda: chosen.function, name_of(task), task)
        kind = signature.answer_type(group.epilogue, TYPES[group.core.data_type])
        if isinstance(group.core, GemmConfig):
            self._product_call(group, group.core, chosen, function, kind)
            return
        assert chosen.shape is not None
        assert chosen.pack is not None
        given = [self._read(group, chosen.shape), relax.const(chosen.pack(group.weights))]
        given += self._added(group)
        value = self._call(function, given, chosen.shape.native_output(), kind)
        self._keep(group, value, kind)
        self._fillers[group.answer] = max(1.0, self._fillers.get(group.residual, 0.0))

    def _added(self, group: FusionGroup) -> list[Any]:
        """The tensors for the steps of a kernel's epilogue."""
        arguments = arguments_of(group.epilogue, padded=pads(group.core))
        return [self._argument(group, argument) for argument in arguments]

    def _argument(self, group: FusionGroup, argument: Argument) -> Any:
        core, value = group.core, group.tensors[argument.role]
        if argument.form == CHANNELS:
            return relax.const(value if isinstance(core, GemmConfig) else self._channels(value))
        if not isinstance(core, GemmConfig):
            return self._kernel_blocks(group, value)
        batch = (core.batch_count,) if core.batch_count > 1 else ()
        residual = self._kernel_plain(group, value)
        return self._shaped(residual, (*batch, *core.stored_shapes["c"]))

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
        given += self._added(group)
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
        self._plain[node.var] = self._fenced(node.var, self._builder.emit(value))


def name_of(task: TaskConfig) -> str:
    kind = "conv" if isinstance(task.core, ConvConfig) else "gemm"
    return "_".join([kind, *task.epilogue])
