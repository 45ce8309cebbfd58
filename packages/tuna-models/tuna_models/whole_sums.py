"""Products and convolutions of int32, as MatMulInteger and ConvInteger are, in exact sums of fp32.
Imports TVM.

fp32 has every whole number up to 2^24. So many products of bytes are added up by a kernel of fp32
that the sum stays below; sums of several such parts are added in int32. Kernels of Winograd's are
not exact, and take no part.
"""

from __future__ import annotations

import math
from collections.abc import Container
from typing import Any

import numpy as np
import tvm
from tvm import relax

from tuna_models.graph import Graph, Node, constant, constant_of, extents, of

#: Operators that sum up products.
_SUMMED = {"matmul", "nn.conv1d", "nn.conv2d", "nn.conv3d"}
#: Largest sum that fp32 is sure to hold, and largest whole number of a byte less a zero point
_EXACT, _BYTE = 1 << 24, 255


def written_out(graph: Graph, taken: Container[Any]) -> tuple[Graph, set[Any]]:
    """Return the graph with such operators in fp32, but for those with variables in `taken`, and
    the variables of their parts; what has too many taps for that stays in int32."""
    nodes, parts = list[Node](), set[Any]()
    for node in graph.nodes:
        written = None
        if node.op in _SUMMED and str(node.var.ty.dtype) == "int32" and node.var not in taken:
            written = _Writer(node).run()
        if written is None:
            nodes.append(node)
        else:
            nodes += written
            parts.update(each.var for each in written if each.op == node.op)
    if not parts:
        return graph, parts
    return of(graph.params, nodes, graph.result, graph.functions, graph.whole), parts


class _Writer:
    """Writes one operator."""

    def __init__(self, node: Node) -> None:
        self._node, self._nodes = node, list[Node]()

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
            value = tvm.ir.Call(node.value.op, given, node.attrs, node.value.ty_args)
            found = self._emit(value, answer, "float32")
            found = self._emit(relax.op.astype(found, "int32"), answer, "int32")
            total = found if total is None else self._emit(relax.op.add(total, found), answer)
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

    def _emit(self, value: Any, shape: tuple[int, ...], kind: str = "int32") -> Any:
        var = relax.Var(f"{self._node.var.name}_{len(self._nodes)}", relax.TensorType(shape, kind))
        self._nodes.append(Node(var, value))
        return var


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
