"""Writes a model's operators on blocks of channels. Imports TVM.

A value of the model has up to two forms, plain and in blocks, each made for its first reader.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence, Set
from functools import partial
from typing import Any

import numpy as np
import tvm
from tvm import relax

from tuna.configs.task import TaskConfig
from tuna.libraries.tvm.kernels.packing import channels_in_blocks, in_blocks
from tuna.libraries.tvm.problems import packed
from tuna_models.compiler import block_operators, blocked, elementwise, fillers, slopes
from tuna_models.compiler.fences import fence
from tuna_models.compiler.graph import Graph, Node, constant_of, extents, scale_and_shift


class BlockEmitter:
    """The values of a model that is being written, in their forms."""

    def __init__(self, graph: Graph, block: int, real: Set[Any] = frozenset()):
        """`real` are the variables whose values are rounded, whatever reads them."""
        self._graph, self._block, self._real = graph, block, real
        self._plain: dict[Any, Any] = {}
        self._blocks: dict[Any, Any] = {}
        self._fillers: dict[Any, float] = {}  #: bounds of values beyond the channels
        self._functions: dict[Any, Any] = {}
        self._reshaped: dict[Any, Any] = {}  #: the source of each reshaped variable
        self._builder = relax.BlockBuilder()
        #: name and task of each function that is not TVM's own
        self.calls: list[tuple[str, TaskConfig | None]] = []

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

    def _in_blocks(self, node: Node) -> bool:
        """Emit an operator in blocks, if an input is there and the operator supports it."""
        if isinstance(node.value, relax.TupleGetItem) and self._normalised(node):
            return True
        if elementwise.works(node, self._block):
            return self._reads_blocks(node.args) and self._elementwise(node)
        if node.op == "nn.prelu":
            return self._reads_blocks(node.args[:1]) and self._rectified(node)
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
        call = tvm.ir.Call(node.value.op, args, node.value.attrs, node.value.ty_args)
        self._blocks[node.var] = self._fenced(node.var, self._builder.emit(call))
        return True

    def _fenced(self, var: Any, value: Any) -> Any:
        """The value of a variable; see `fences.py`."""
        return self._builder.emit_te(fence, value) if var in self._real else value

    def _rectified(self, node: Node) -> bool:
        """Emit a product of negative values with one for each channel."""
        values, shape = slopes.find(node), extents(node.var)
        if values is None or shape is None or len(shape) not in elementwise.IMAGES:
            return False
        if not elementwise.fits(relax.const(values), shape, self._block):
            return False
        op, emit, x = relax.op, self._builder.emit, self.blocks(node.args[0])
        scaled = emit(op.multiply(x, self._operand(relax.const(values))))
        positive = emit(op.greater(x, relax.const(0.0)))
        self._blocks[node.var] = emit(op.where(positive, x, scaled))
        self._fillers[node.var] = self._filler(node.args[0]) * max(1.0, float(np.abs(values).max()))
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
