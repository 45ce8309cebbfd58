"""Rewrites a model with kernels in bf16: what they read and write is stored in bfloat16, where it
may be (`bf16_storage.py`). Imports TVM.

A value has up to two more forms, bfloat16 in the model's layout and in blocks of channels. All
other operators compute in fp32, on values that are converted where these are read
(`conversions.py`).
"""

from __future__ import annotations

from collections.abc import Callable, Set
from dataclasses import replace
from typing import Any

import numpy as np
from tvm import relax

from tuna.configs import ConvConfig, GemmConfig, TaskConfig
from tuna.configs.task import CASTS
from tuna.configs.values import DataType
from tuna.libraries.tvm.kernels.packing import fit_transformed
from tuna_models.compiler import block_operators, blocked, conversions
from tuna_models.compiler.bf16_storage import MOVING, Bf16Storage
from tuna_models.compiler.blocked import BF16, FP32
from tuna_models.compiler.emit import Chosen, Emitter
from tuna_models.compiler.graph import (
    RESHAPES,
    Graph,
    Node,
    constant_of,
    extents,
    substitute,
    variables,
)
from tuna_models.compiler.groups import FusionGroup

_TO_FP32 = "to_fp32"


class Bf16Emitter(Emitter):
    """One model, written once by `run`."""

    def __init__(
        self,
        graph: Graph,
        groups: list[FusionGroup],
        kernel: Callable[[TaskConfig], Chosen | None],
        block: int,
        storage: Bf16Storage,
    ):
        """See `Emitter`."""
        super().__init__(graph, groups, kernel, block)
        self._storage = storage
        self._narrow: dict[Any, Any] = {}
        self._narrow_blocks: dict[Any, Any] = {}
        self._conversions: dict[tuple[int, ...], Any] = {}
        self._results = _results(graph)

    def plain(self, var: Any) -> Any:
        """The value in the model's own layout and type."""
        if var not in self._plain and var not in self._blocks:
            if var in self._narrow:
                self._plain[var] = self._converted(self._narrow[var])
            else:
                self._plain[var] = self._from_blocks(var, self._narrow_blocks[var], BF16, FP32)
        return super().plain(var)

    def blocks(self, var: Any) -> Any:
        """The value in blocks of channels, in its own type."""
        if var not in self._blocks:
            if var in self._narrow_blocks:
                self._blocks[var] = self._converted(self._narrow_blocks[var])
            else:
                self.plain(var)
        return super().blocks(var)

    def narrow(self, leaf: Any) -> Any:
        """A variable or constant in the model's layout, in bfloat16."""
        values = constant_of(leaf)
        if values is not None:
            return relax.op.astype(self._leaf(leaf), BF16)
        if leaf not in self._narrow:
            if leaf in self._plain:
                self._narrow[leaf] = self._builder.emit(relax.op.astype(self._plain[leaf], BF16))
            elif leaf in self._narrow_blocks:
                self._narrow[leaf] = self._from_blocks(leaf, self._narrow_blocks[leaf], BF16)
            else:
                self._narrow[leaf] = self._from_blocks(leaf, self._blocks[leaf], FP32, BF16)
        return self._narrow[leaf]

    def narrow_blocks(self, var: Any) -> Any:
        """The value in blocks of channels, in bfloat16."""
        if var not in self._narrow_blocks:
            if var in self._blocks:
                value = self._builder.emit(relax.op.astype(self._blocks[var], BF16))
                self._narrow_blocks[var] = value
            elif var in self._narrow:
                self._narrow_blocks[var] = self._to_blocks(var, self._narrow[var], BF16)
            else:
                self._narrow_blocks[var] = self._to_blocks(var, self._plain[var], FP32, BF16)
        return self._narrow_blocks[var]

    def _converted(self, value: Any) -> Any:
        """The value in fp32, by a function that its readers can do without."""
        shape = extents(value)
        assert shape is not None
        if shape not in self._conversions:
            function = conversions.of(shape)
            self._conversions[shape] = self._builder.add_func(function, "to_fp32")
        return self._call(self._conversions[shape], [value], shape, FP32)

    def _emit(self, node: Node) -> None:
        group = self._last.get(node.var)
        if group is not None and self._storage.computes(group):
            in_bf16 = self._in_bf16(group)
            chosen = self._kernel(in_bf16.task, exact=in_bf16.exact)
            if chosen is not None:
                self._kernel_call(in_bf16, chosen)
                return
        super()._emit(node)

    def _in_bf16(self, group: FusionGroup) -> FusionGroup:
        """The group with its core in bf16; an answer of the model, or one that may not be stored in
        bfloat16, is written in fp32."""
        epilogue = list(group.epilogue)
        wide = group.answer in self._results or not self._storage.stores(group.answer)
        if wide and not set(epilogue[-1:]) & set(CASTS):
            epilogue.append(_TO_FP32)
        core = replace(group.core, data_type=DataType.BF16)
        exact = group.exact or (isinstance(core, ConvConfig) and not fit_transformed(group.weights))
        return replace(group, core=core, epilogue=epilogue, exact=exact)

    def _kernel_blocks(self, group: FusionGroup, var: Any) -> Any:
        return self.narrow_blocks(var) if _is_bf16(group) else super()._kernel_blocks(group, var)

    def _kernel_plain(self, group: FusionGroup, leaf: Any) -> Any:
        return self.narrow(leaf) if _is_bf16(group) else super()._kernel_plain(group, leaf)

    def _keep(self, group: FusionGroup, value: Any, kind: str) -> None:
        if kind != BF16 or str(group.answer.ty.dtype) == BF16:
            super()._keep(group, value, kind)
        elif isinstance(group.core, GemmConfig):
            self._narrow[group.answer] = value
        else:
            self._narrow_blocks[group.answer] = value

    def _window_source(self, group: FusionGroup, window: blocked.Window) -> tuple[Any, str, str]:
        if not _is_bf16(group):
            return super()._window_source(group, window)
        var, in_blocks = group.input, window.blocked
        narrow, wide = self._narrow, self._plain
        if in_blocks:
            narrow, wide = self._narrow_blocks, self._blocks
        if var in wide and var not in narrow:  # the copy rounds
            return wide[var], FP32, BF16
        return self.narrow_blocks(var) if in_blocks else self.narrow(var), BF16, BF16

    def _reads_blocks(self, sources: Any) -> bool:
        return super()._reads_blocks(sources) or any(
            isinstance(each, relax.Var) and each in self._narrow_blocks for each in sources
        )

    def _block_function(
        self, node: Node, found: block_operators.BlockFunction, shape: tuple[int, ...]
    ) -> None:
        if not all(map(self._storage.stores, found.sources)):
            super()._block_function(node, found, shape)
            return
        function = self._of_blocks(found, BF16)
        sources = [self.narrow_blocks(source) for source in found.sources]
        if found.plain is None:
            extended = blocked.blocked_extents(shape, self._block)
            self._narrow_blocks[node.var] = self._call(function, sources, extended, BF16)
            self._fillers[node.var] = max(self._fillers.get(var, 0.0) for var in found.sources)
        else:
            self._plain[node.var] = self._shaped(self._call(function, sources, found.plain), shape)

    def _operator(self, node: Node) -> None:
        if not self._moved(node):
            super()._operator(node)

    def _moved(self, node: Node) -> bool:
        """Move values as they are stored, if they are bfloat16 in the model's layout."""
        if isinstance(node.value, relax.TupleGetItem):
            whole = self._narrow.get(node.value.tuple_value)
            if whole is None:
                return False
            value = relax.TupleGetItem(whole, int(node.value.index))
            self._narrow[node.var] = self._builder.emit(value)
            return True
        sources = variables(node.value)
        if node.op not in MOVING or not sources:
            return False
        if any(source not in self._narrow or source in self._plain for source in sources):
            return False
        if any(_is_constant_tensor(arg) for arg in node.args):
            return False
        shape = extents(node.var)
        if node.op in RESHAPES and shape is not None:
            self._narrow[node.var] = self._shaped(self._narrow[sources[0]], shape)
        else:
            value = substitute(node.value, lambda leaf: self._narrow.get(leaf, leaf))
            self._narrow[node.var] = self._builder.emit(value)
        return True


def _is_bf16(group: FusionGroup) -> bool:
    return group.core.data_type is DataType.BF16


def _is_constant_tensor(arg: Any) -> bool:
    parts = getattr(arg, "fields", [arg])
    found = [constant_of(part) for part in parts]
    return any(values is not None and values.dtype == np.float32 for values in found)


def _results(graph: Graph) -> Set[Any]:
    """The answers of the model, and the values of which they are other shapes."""
    found = set(variables(graph.result))
    for node in reversed(graph.nodes):
        if node.var in found and node.op in RESHAPES:
            found.update(variables(node.value))
    return found
