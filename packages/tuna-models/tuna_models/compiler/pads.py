"""Recognises operators that put a constant around a tensor, as Relax or TVM's importer writes them.
Imports TVM."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import tvm
import tvm_ffi
from tvm import sym, tirx

from tuna_models.compiler.graph import Node, extents


@dataclass(frozen=True)
class Padding:
    """Numbers of values before and after each axis, none negative, and the value."""

    before: tuple[int, ...]
    after: tuple[int, ...]
    value: float

    @property
    def only_spatial(self) -> bool:
        """Whether batch and channels, the first two axes, stay as they are."""
        return not any(self.before[:2] + self.after[:2])


def of(node: Node, functions: Mapping[Any, Any]) -> Padding | None:
    """Return the padding that an operator, or one of the functions, does; None for any other."""
    if node.op == "nn.pad" and str(node.attrs.pad_mode) == "constant":
        widths = [int(width) for width in node.attrs.pad_width]
        before, after = widths[::2], widths[1::2]
        value = float(node.attrs.pad_value)
    elif node.op == "call_tir" and node.args[0].name_hint.rstrip("0123456789_") == "pad":
        found = _of_function(functions[node.args[0]])
        given, made = extents(node.args[1].fields[0]), extents(node.var)
        if found is None or given is None or made is None:
            return None
        before, value = found
        after = [out - size - first for out, size, first in zip(made, given, before, strict=True)]
    else:
        return None
    if min(*before, *after) < 0:
        return None
    return Padding(tuple(before), tuple(after), value)


def source(node: Node) -> Any:
    """The variable that a padding reads."""
    return node.args[1].fields[0] if node.op == "call_tir" else node.args[0]


def _of_function(function: Any) -> tuple[list[int], float] | None:
    """Numbers of values before each axis, and the value, of a function of `topi.nn.pad`.

    It writes `if_then_else(inside, X[i - before, ...], value)`.
    """
    stores: list[Any] = []
    tvm_ffi.structural_walk(function.body, (tirx.BufferStore, stores.append))
    chosen = stores[0].value if len(stores) == 1 else None
    if not isinstance(chosen, tvm.ir.Call) or chosen.op.name != "prim.if_then_else":
        return None
    _, read, value = chosen.args
    if not isinstance(read, tvm.ir.TensorLoad) or not isinstance(value, tirx.FloatImm):
        return None
    analyzer, before = sym.Analyzer(), []
    for index, written in zip(read.indices, stores[0].indices, strict=True):
        width = analyzer.simplify(written - index)
        if not isinstance(width, tirx.IntImm):
            return None
        before.append(int(width))
    return before, float(value)
