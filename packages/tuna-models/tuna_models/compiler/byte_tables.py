"""Functions of one tensor of bytes between two roundings, as tables of 256 bytes. Imports TVM.

Activations of a quantised tensor, and a change of its scale, have as many answers as a byte has
values. They are computed here in fp32, one operator after the other as the model has them, but for
functions that are not exact in fp32: these are rounded from double precision.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import partial
from typing import Any

import numpy as np
from tvm import relax

from tuna.configs.task import DEFINITIONS, SIGMOID
from tuna.libraries.task_reference import FUNCTIONS
from tuna.libraries.tvm.kernels.look_up import ENTRIES
from tuna_models.compiler.graph import Graph, Node, constant_of, extents
from tuna_models.compiler.integer_groups import IntegerGroups, Multiplication, Table
from tuna_models.compiler.integers import Integers

_SAME = ("add", "subtract", "multiply", "divide", "maximum", "minimum", "abs", "negative")
_ROUNDED = ("ceil", "floor", "trunc", "sign", "square", "sqrt")
_INEXACT = ("exp", "log", "tanh", "sinh", "cosh", "sin", "cos")


Function = Callable[..., Any]


def _in_double(function: Function) -> Function:
    return lambda x: function(x.astype(np.float64)).astype(np.float32)


def _step(definition: Function) -> Function:
    return _in_double(partial(definition, FUNCTIONS))


#: Operators on single values by NumPy
_VALUES: Mapping[str, Function] = {
    **{f"nn.{name}": _step(each) for name, each in DEFINITIONS.items()},
    "sigmoid": _step(DEFINITIONS[SIGMOID]),
    "erf": _in_double(FUNCTIONS.erf),
    **{name: _in_double(getattr(np, name)) for name in _INEXACT},
    **{name: getattr(np, name) for name in (*_SAME, *_ROUNDED)},
    "round": np.rint,
    "clip": np.clip,
    "nn.leakyrelu": lambda x, slope: np.where(x > 0, x, x * slope),
}


def find(graph: Graph, groups: IntegerGroups, *, through: bool) -> list[Table]:
    """Return the tables of roundings that are part of no kernel: `through` the roundings before
    them, else each of the last one. A product with itself of what a table makes is one too."""
    finder = _Finder(groups.integers, through=through)
    pairs, taken = {pair.answer: pair for pair in groups.pairs}, groups.taken
    for node in graph.nodes:
        pair = pairs.get(node.var)
        if isinstance(pair, Multiplication):
            finder.product(pair)
        elif node.var not in taken:
            finder.visit(node)
    return list(finder.tables.values())


@dataclass
class _Values:
    """The values of a variable for each byte of a source."""

    source: Any
    values: Any


class _Finder:
    def __init__(self, integers: Integers, *, through: bool) -> None:
        self._integers, self._through = integers, through
        self.tables: dict[Any, Table] = {}  #: by their answers
        self._computed: dict[Any, _Values] = {}

    def visit(self, node: Node) -> None:
        """Compute an operator, if all that it reads are one tensor of bytes and constants."""
        if node.op not in _VALUES or node.var in self._integers.moving:
            return
        if str(getattr(node.var.ty, "dtype", "")) != "float32":
            return
        shape, args, sources = extents(node.var), list[Any](), list[Any]()
        for arg in node.args:
            if isinstance(arg, relax.Var):
                known = self._of(arg)
                if known is None or extents(arg) != shape:
                    return
                args.append(known.values)
                sources.append(known.source)
            else:
                value = _number(arg)
                if value is None:
                    return
                args.append(value)
        if not sources or not all(source.same_as(sources[0]) for source in sources):
            return
        if node.op == "nn.leakyrelu":
            args.append(np.float32(node.attrs.alpha))
        with np.errstate(all="ignore"):
            values = np.asarray(_VALUES[node.op](*args), np.float32)
        if np.any(np.isnan(values)):
            return
        self._computed[node.var] = _Values(sources[0], values)
        signed = self._integers.signed.get(node.var)
        if signed is not None:  # these are the whole numbers of a rounding
            entries = (values + 128.0 * signed).astype(np.uint8)
            self.tables[node.var] = Table(sources[0], node.var, entries)

    def product(self, pair: Multiplication) -> None:
        """Compute the product of two tensors of bytes that are functions of the same one."""
        if not self._through:
            return
        one, other = (self._stored(self._integers.bases[var]) for var in (pair.first, pair.second))
        if one.source.same_as(other.source):
            entries = pair.of(one.values, other.values)
            self.tables[pair.answer] = Table(one.source, pair.answer, entries)

    def _stored(self, base: Any) -> _Values:
        """The bytes of whole numbers."""
        table = self.tables.get(base) if self._through else None
        if table is not None:
            return _Values(table.source, table.entries)
        return _Values(base, np.arange(ENTRIES, dtype=np.uint8))

    def _of(self, var: Any) -> _Values | None:
        integers = self._integers
        if var in self._computed and var not in self.tables:
            return self._computed[var]
        base = integers.bases.get(var)
        if base is None:
            return None
        stored, grid = self._stored(base), integers.grids.get(var)
        if grid is not None:
            return _Values(stored.source, grid.real(stored.values))
        offset = np.float32(128.0 * integers.signed[base])
        return _Values(stored.source, stored.values.astype(np.float32) - offset)


def _number(arg: Any) -> Any:
    """An argument that is one number, None for another."""
    values = constant_of(arg)
    if values is None:
        value = getattr(arg, "value", None)  # a limit of a clip
        return None if value is None else np.float32(value)
    return np.float32(values.item()) if values.size == 1 else None
