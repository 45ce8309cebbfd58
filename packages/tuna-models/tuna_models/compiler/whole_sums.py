"""Products, convolutions and averages of whole numbers that no kernel of bytes takes, in exact sums
of fp32. Imports TVM.

Those of int32, as MatMulInteger and ConvInteger are: fp32 has every whole number up to 2^24. So
many products of bytes are added up by a kernel of fp32 that the sum stays below; sums of several
such parts are added in int32.

Those of the real values of two quantised tensors: the whole numbers are summed, and the sum is
multiplied by both scales once. Rounded products of real values would be off by 1e-4 of a step.

Averages of the real values of a quantised tensor, and its linear interpolation: the mean of whole
numbers is multiplied once by the scale, over that of the rounding that follows. A mean of four is a
tie in one of four places.

Kernels of Winograd's are not exact, and take no part.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

import numpy as np
import tvm
from tvm import relax

from tuna_models.compiler.graph import Graph, Node, constant, constant_of, extents
from tuna_models.compiler.integer_groups import IntegerGroups
from tuna_models.compiler.integers import Grid, Integers

#: Operators that sum up products, with the axis of the weights that the answer has.
_SUMMED = {"matmul": -1, "nn.conv1d": 0, "nn.conv2d": 0, "nn.conv3d": 0, "nn.conv2d_transpose": 1}
_AVERAGED = {"nn.avg_pool1d", "nn.avg_pool2d", "nn.avg_pool3d"}
#: Largest sum that fp32 is sure to hold, and largest whole number of a byte less a zero point
_EXACT, _BYTE = 1 << 24, 255


def written_out(graph: Graph, bytes_of: IntegerGroups) -> tuple[Graph, set[Any]]:
    """Return the graph with such operators in fp32, but for those that are computed with bytes, and
    the variables of their parts; what has too many taps for that stays in int32."""
    nodes, parts, replaced = list[Node](), set[Any](), set[Any]()
    taken, integers = bytes_of.taken, bytes_of.integers
    for node in graph.nodes:
        written = None
        if node.var in replaced:
            continue
        if _is_average(node) and node.args[0] in integers.grids:
            written = _Averaged(node, graph, integers).scaled()
            replaced.update(each.var for each in written)
        elif node.op in _SUMMED and node.var not in taken:
            if str(node.var.ty.dtype) == "int32":
                written = _Writer(node).run()
            else:
                written = _Scaled(node, graph, integers).run()
        if written is None:
            nodes.append(node)
        else:
            nodes += written
            parts.update(each.var for each in written if each.op == node.op)
    if not parts and not replaced:
        return graph, parts
    return replace(graph, nodes=nodes), parts


class _Nodes:
    """Operators in the place of one."""

    def __init__(self, node: Node) -> None:
        self._node, self._nodes = node, list[Node]()

    def _emit(self, value: Any, shape: tuple[int, ...], kind: str = "int32") -> Any:
        var = relax.Var(f"{self._node.var.name}_{len(self._nodes)}", relax.TensorType(shape, kind))
        self._nodes.append(Node(var, value))
        return var

    def _called(self, given: list[Any], shape: tuple[int, ...]) -> Any:
        """The answer of the operator on other arguments, in fp32."""
        value = self._node.value
        call = tvm.ir.Call(value.op, given, value.attrs, value.ty_args)
        return self._emit(call, shape, "float32")


class _Scaled(_Nodes):
    """Writes an operator on real values of quantised tensors as one on their whole numbers."""

    def __init__(self, node: Node, graph: Graph, integers: Integers) -> None:
        super().__init__(node)
        self._graph, self._integers = graph, integers
        self._whole, self._grids = graph.whole, integers.grids

    def run(self) -> list[Node] | None:
        """The operators, the last with the variable of the original; None where it stays."""
        x, w = self._node.args[:2]
        shape = extents(self._node.var)
        if x not in self._grids or shape is None:
            return None
        scales: Any = self._scales(w)
        if scales is None:
            return None
        given = [self._centered(x), self._weights(w)]
        channels = (-1,) if self._node.op == "matmul" else (1, -1, *[1] * (len(shape) - 2))
        factor = (self._grids[x].scale * scales.astype(np.float64)).astype(np.float32)
        factor = factor.reshape(channels if factor.ndim else ())
        product = relax.op.multiply(self._called(given, shape), constant(factor))
        return [*self._nodes, Node(self._node.var, product)]

    def _scales(self, w: Any) -> Any:
        """The scale of the second factor, or one for each channel; None for a real one."""
        if w in self._grids:
            return np.asarray(self._grids[w].scale)
        if w not in self._whole or np.abs(self._whole[w].numbers).max(initial=0) > _BYTE:
            return None
        axis = _SUMMED[self._node.op]
        if self._node.op.endswith("transpose") and int(self._node.attrs.groups) > 1:
            return None
        numbers = self._whole[w].numbers
        return self._whole[w].along(axis % numbers.ndim) if numbers.ndim > 1 else None

    def _weights(self, w: Any) -> Any:
        if w in self._grids:
            return self._centered(w)
        return constant(self._whole[w].numbers.astype(np.float32))

    def _centered(self, var: Any) -> Any:
        """The whole numbers of real values less their zero point, in fp32."""
        shape = extents(var)
        assert shape is not None
        if var in self._graph.quantisations:
            return self._graph.makers[var].args[0]
        scale = relax.const(self._grids[var].scale, "float32")
        steps = self._emit(relax.op.divide(var, scale), shape, "float32")
        return self._emit(relax.op.round(steps), shape, "float32")


class _Averaged(_Scaled):
    """Writes an average of the real values of a quantised tensor as one of its whole numbers."""

    def scaled(self) -> list[Node]:
        """The operators, the last ones with the variables that `multiples` names."""
        (x, *rest), shape = self._node.args, extents(self._node.var)
        assert shape is not None
        mean = self._called([self._centered(x), *rest], shape)
        found = multiples(self._node.var, self._grids[x], self._graph.users, self._integers)
        return self._nodes + [
            Node(var, relax.op.multiply(mean, relax.const(factor, "float32")))
            for var, factor in found.items()
        ]


def _is_average(node: Node) -> bool:
    """Whether an operator adds up its values with weights."""
    return node.op in _AVERAGED or (node.op == "image.resize2d" and node.attrs.method == "linear")


def multiples(
    var: Any, grid: Grid, users: Mapping[Any, Sequence[Node]], integers: Integers
) -> dict[Any, float]:
    """The variables that are multiples of an average `var` of whole numbers on a grid, and by how
    much: that of their real values, and its quotients by the scales of roundings."""
    roundings = (integers.roundings.get(user.var) for user in users.get(var, ()))
    read = {each.nodes[0].var: grid.scale / each.grid.scale for each in roundings if each}
    return {var: grid.scale, **read}


class _Writer(_Nodes):
    """Writes one operator on int32."""

    def run(self) -> list[Node] | None:
        """The operators, the last with the variable of the original; None where it stays."""
        node = self._node
        (x, w), product = node.args[:2], node.op == "matmul"
        sizes, weights, answer = extents(x), _shape(w), extents(node.var)
        if sizes is None or weights is None or answer is None:
            return None
        axes = (len(sizes) - 1, max(len(weights) - 2, 0)) if product else (1, 1)
        length = weights[axes[1]]
        summed = axes[1:] if product else tuple(range(1, len(weights)))
        step = _step(constant_of(w), summed, weights)
        if step < length and (not step or (not product and int(node.attrs.groups) != 1)):
            return None
        total = None
        for first in range(0, length, max(step, 1)):
            part = None if step >= length else (first, min(first + step, length))
            given = [self._part(*each, part) for each in zip((x, w), axes, strict=True)]
            addend = self._called(given, answer)
            addend = self._emit(relax.op.astype(addend, "int32"), answer, "int32")
            total = addend if total is None else self._emit(relax.op.add(total, addend), answer)
        last_node = self._nodes.pop()
        return [*self._nodes, Node(node.var, last_node.value)]

    def _part(self, leaf: Any, axis: int, part: tuple[int, int] | None) -> Any:
        """A factor, or a part of it along an axis, in fp32."""
        values, shape = constant_of(leaf), _shape(leaf)
        assert shape is not None
        if values is not None:
            values = values if part is None else values.take(range(*part), axis)
            return constant(values.astype(np.float32))
        if part is not None:
            first, last = part
            shape = (*shape[:axis], last - first, *shape[axis + 1 :])
            leaf = self._emit(relax.op.strided_slice(leaf, [axis], [first], [last]), shape)
        return self._emit(relax.op.astype(leaf, "float32"), shape, "float32")


def _shape(leaf: Any) -> tuple[int, ...] | None:
    values = constant_of(leaf)
    return extents(leaf) if values is None else values.shape


def _step(values: Any, summed: tuple[int, ...], shape: tuple[int, ...]) -> int:
    """Number of extents of the first `summed` axis whose sums fp32 holds; `values` are those of the
    weights, None where they are not known."""
    length, *taps = (shape[axis] for axis in summed)
    largest = _BYTE
    if values is not None:
        magnitudes = np.abs(values.astype(np.int64))
        if _BYTE * int(magnitudes.sum(summed).max(initial=0)) <= _EXACT:
            return length
        largest = int(magnitudes.max())
    return min(length, _EXACT // (_BYTE * largest * math.prod(taps)))
