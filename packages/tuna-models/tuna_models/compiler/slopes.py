"""Functions that multiply negative values by a constant: LeakyReLU, and PReLU with one for each
channel. Imports TVM."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

import numpy as np
from tvm import relax

from tuna_models.compiler import graph
from tuna_models.compiler.graph import Graph, Node, constant_of, extents

#: Comparisons with 0 that hold of positive values, and of negative ones.
_POSITIVE, _NEGATIVE = {"greater", "greater_equal"}, {"less", "less_equal"}


def find(node: Node) -> Any:
    """Return the factors of an operator's negative values in fp32, which NumPy broadcasts to these;
    None for any other operator, and for factors that are no finite constants."""
    shape, axis = extents(node.var), 0
    values: Any
    if node.op == "nn.leakyrelu":
        values = np.array(float(node.attrs.alpha), np.float32)
    elif node.op == "nn.prelu":
        values, axis = constant_of(node.args[1]), int(node.attrs.axis)
    else:
        return None
    if shape is None or values is None or str(node.var.ty.dtype) != "float32":
        return None
    if not np.all(np.isfinite(values)):
        return None
    by_axis = [1] * len(shape)
    by_axis[axis] = values.size
    return values.reshape(by_axis)


def restored(found: Graph) -> Graph:
    """The graph with PReLU where it is written as a choice by a comparison with 0, or as the larger
    of a value and a part of it."""
    nodes = [_restored(node, found.makers) for node in found.nodes]
    return replace(found, nodes=graph.needed(nodes, found.result))


def _restored(node: Node, makers: Mapping[Any, Node]) -> Node:
    shape = extents(node.var)
    if node.op not in ("where", "maximum") or str(getattr(node.var.ty, "dtype", "")) != "float32":
        return node
    for x, scaled in _sides(node, makers):
        values = _factors(makers.get(scaled), x)
        if values is None or shape is None or extents(x) != shape:
            continue
        if node.op == "maximum" and not np.all((values > 0) & (values <= 1)):
            continue
        wide = [place for place, extent in enumerate(values.shape[::-1]) if extent != 1]
        if len(wide) <= 1:
            axis = len(shape) - 1 - sum(wide)
            factors = relax.const(values.reshape(-1))
            return Node(node.var, relax.op.nn.prelu(x, factors, axis))
    return node


def _sides(node: Node, makers: Mapping[Any, Node]) -> list[list[Any]]:
    """The value for positive ones and that for negative ones, as they may be."""
    if node.op == "maximum":
        return [node.args, node.args[::-1]]
    chosen, *sides = node.args
    compared = makers.get(chosen)
    if compared is None or compared.op not in _POSITIVE | _NEGATIVE:
        return []
    sides = sides if compared.op in _POSITIVE else sides[::-1]
    zero = constant_of(compared.args[1])
    known = zero is not None and zero.size == 1 and not np.any(zero)
    return [sides] if known and compared.args[0].same_as(sides[0]) else []


def _factors(node: Node | None, x: Any) -> Any:
    """The constant by which a product multiplies x; None for anything else."""
    if node is None or node.op != "multiply":
        return None
    first, second = node.args
    if first.same_as(x):
        return constant_of(second)
    return constant_of(first) if second.same_as(x) else None
