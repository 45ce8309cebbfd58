"""Finds the convolutions and products of a model. Imports TVM.

The operators of their epilogues are found by `rules`.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Set
from dataclasses import dataclass, field, replace
from typing import Any

import numpy as np
from tvm import relax

from tuna.configs import GemmConfig
from tuna.configs.task import Core, TaskConfig
from tuna_models.compiler import convolutions
from tuna_models.compiler.blocked import Window
from tuna_models.compiler.convolutions import UNKNOWN_SHAPE, Interleaving
from tuna_models.compiler.graph import Graph, Node, constant_of, extents

#: Values of a constant first factor that are written for a whole batch, at most.
_REPEATED = 1 << 22
#: Names of what an attention reads beside queries and keys, as `FusionGroup.added` has it
VALUES, MASKS, ZEROED = "values", "masks", "zeroed"
#: Operators that are convolutions and products
CORES = {*convolutions.LAYOUTS, "matmul"}


@dataclass
class FusionGroup:
    """A core with its weights, and the operators that became its epilogue."""

    core: Core
    input: Any  #: the variable that it reads, or a constant first factor
    #: a convolution: K, C/groups, R, S; a product: (batch x) K x N; None for a product whose second
    #: factor is a variable
    weights: Any
    other: Any = None  #: the second variable of such a product, or the keys of an attention
    order: list[int] | None = None  #: Order of the axes of `other`, as the product takes them
    window: Window | None = None  #: the copy of the input that a convolution reads instead
    epilogue: list[str] = field(default_factory=list)
    #: what its steps read, by role: values for each output channel or column, or a variable
    added: dict[str, Any] = field(default_factory=dict)
    #: Nodes of the model, in order; the last one's variable is the answer
    nodes: list[Node] = field(default_factory=list)
    interleaving: Interleaving | None = None
    adds: Callable[[Any], bool] | None = None  #: whether a variable may be the residual; None: any
    #: True where no kernel of Winograd's will do: for sums of whole numbers, which it would round,
    #: and in bf16 for weights that its fp16 does not hold
    exact: bool = False
    #: reasons why operators behind it are no part of it, by their labels
    reasons: dict[str, str] = field(default_factory=dict)

    @property
    def answer(self) -> Any:
        """The variable that the group computes."""
        return self.nodes[-1].var

    @property
    def operands(self) -> list[Any]:
        """The variables that it reads."""
        leaves = [self.input, self.other, *self.added.values()]
        return [leaf for leaf in leaves if isinstance(leaf, relax.Var)]

    @property
    def task(self) -> TaskConfig:
        """The group as a config, for a model whose tensors are in blocks."""
        layouts = "layer" if self.weights is None else "native"
        last = [] if self.interleaving is None else [self.interleaving.step]
        return TaskConfig(core=self.core, layouts=layouts, epilogue=(*self.epilogue, *last))

    def repeated(self, values: Any) -> Any:
        """Values for each channel of the answer, for each channel of the core."""
        return values if self.interleaving is None else self.interleaving.repeated(values)


def find(
    graph: Graph,
    block: int,
    others: Set[Any] = frozenset(),
    exact: Set[Any] = frozenset(),
    adds: Callable[[Any], bool] | None = None,
) -> tuple[list[FusionGroup], dict[str, str]]:
    """The convolutions and products of the model, for kernels with channels in blocks of `block`,
    and why there are no others, by the operator's label.

    None has its variable among `others`. Those with variables in `exact` sum whole numbers. `adds`
    says of a variable whether it may be a residual; None: any.
    """
    groups, reasons = list[FusionGroup](), dict[str, str]()
    for node in graph.nodes:
        if node.var in others or node.op not in CORES:
            continue
        is_product = node.op == "matmul"
        group = _product(node, graph.makers) if is_product else _convolution(node, graph, block)
        if isinstance(group, str):
            reasons[node.label] = group
        else:
            group.exact, group.adds = node.var in exact, adds
            groups.append(group)
    return groups, reasons


def _convolution(node: Node, graph: Graph, block: int) -> FusionGroup | str:
    layer = convolutions.find(node, graph, block)
    if isinstance(layer, str):
        return layer
    return FusionGroup(
        layer.core,
        layer.input,
        layer.weights,
        window=layer.window,
        nodes=layer.nodes,
        interleaving=layer.interleaving,
    )


def _product(node: Node, makers: Mapping[Any, Node]) -> FusionGroup | str:
    shape, weights = extents(node.args[0]), constant_of(node.args[1])
    if weights is None:
        return _product_with_variable(node, makers)
    if shape is None:
        return UNKNOWN_SHAPE
    if weights.dtype != np.float32:
        return f"its weights are {weights.dtype}"
    if min(weights.ndim, len(shape)) < 2:
        return "a factor is a vector"
    *lead, k, n = weights.shape
    batch, rows = math.prod(lead), math.prod(shape[:-1])
    if batch > 1 and tuple(lead) != shape[:-2]:
        return "its factors are batches of different extents"
    weights = weights.reshape(*([batch] if batch > 1 else []), k, n)
    core = GemmConfig(m=rows // batch, n=n, k=k, batch_count=batch)
    return FusionGroup(core, node.args[0], weights, nodes=[node])


def _product_with_variable(node: Node, makers: Mapping[Any, Node]) -> FusionGroup | str:
    """Return the group of a batched product whose second factor is a variable.

    If that is a transposition, the product reads its source. A constant first factor is repeated
    for the whole batch.
    """
    first, second = node.args
    other, values = extents(second), constant_of(first)
    if values is not None and other is not None and values.ndim <= len(other):
        whole = (*other[:-2], *values.shape[-2:])
        if math.prod(values.shape[:-2]) == 1 and math.prod(whole) <= _REPEATED:
            values = values.reshape(values.shape[-2:])
            first = relax.const(np.ascontiguousarray(np.broadcast_to(values, whole)))
    shape = extents(first)
    if shape is None or other is None:
        return UNKNOWN_SHAPE
    if node.var.ty.dtype != "float32":
        return f"its answer is {node.var.ty.dtype}"
    if len(shape) < 2 or shape[:-2] != other[:-2]:
        return "its factors are vectors or batches of different extents"
    core = GemmConfig(m=shape[-2], n=other[-1], k=shape[-1], batch_count=math.prod(shape[:-2]))
    maker = makers.get(second)
    if maker is not None and maker.op == "permute_dims" and maker.attrs.axes is not None:
        *lead, rows, columns = (int(axis) for axis in maker.attrs.axes)
        if rows == len(lead) + 1:  # else contiguous values would be scattered
            return FusionGroup(
                replace(core, trans_b=True),
                first,
                None,
                maker.args[0],
                [*lead, columns, rows],
                nodes=[node],
            )
    return FusionGroup(core, first, None, second, nodes=[node])
