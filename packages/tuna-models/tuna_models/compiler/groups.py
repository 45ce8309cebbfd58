"""Finds the convolutions and products of a model with the operators of their epilogues."""

from __future__ import annotations

import math
from collections.abc import Callable, Set
from dataclasses import dataclass, field, replace
from typing import Any

import numpy as np
from tvm import relax

from tuna.configs import ConvConfig, GemmConfig
from tuna.configs.task import ACTIVATIONS, BIAS, CASTS, PRELU, RESIDUAL, TaskConfig
from tuna.configs.values import Direction
from tuna_models.compiler import activations, convolutions, slopes
from tuna_models.compiler.blocked import Window
from tuna_models.compiler.graph import RESHAPES, Graph, Node, constant_of, extents, scale_and_shift

#: Values of a constant first factor that are written for a whole batch, at most.
_REPEATED = 1 << 22


@dataclass
class FusionGroup:
    """A core with its weights, and the operators that became its epilogue."""

    core: ConvConfig | GemmConfig
    input: Any  #: the variable that it reads, or a constant first factor
    #: a convolution: K, C/groups, R, S; a product: (batch x) K x N; None for a product whose second
    #: factor is a variable
    weights: Any
    other: Any = None  #: the second variable of such a product
    order: list[int] | None = None  #: Order of the axes of `other`, as the product takes them
    window: Window | None = None  #: the copy of the input that a convolution reads instead
    bias: Any = None  #: a value for each output channel or column
    residual: Any = None  #: the variable that is added
    slopes: Any = None  #: what negative values of each output channel or column are multiplied by
    epilogue: list[str] = field(default_factory=list)
    #: Nodes of the model, in order; the last one's variable is the answer
    nodes: list[Node] = field(default_factory=list)
    adds: Callable[[Any], bool] | None = None  #: whether a variable may be the residual; None: any
    #: True where no kernel of Winograd's will do: for sums of whole numbers, which it would round,
    #: and in bf16 for weights that its fp16 does not hold
    exact: bool = False

    @property
    def answer(self) -> Any:
        """The variable that the group computes."""
        return self.nodes[-1].var

    @property
    def tensors(self) -> dict[str, Any]:
        """The tensors of the epilogue's arguments, by role."""
        return {BIAS: self.bias, PRELU: self.slopes, RESIDUAL: self.residual}

    @property
    def task(self) -> TaskConfig:
        """The group as a config, for a model whose tensors are in blocks."""
        layouts = "layer" if self.weights is None else "native"
        return TaskConfig(core=self.core, layouts=layouts, epilogue=tuple(self.epilogue))


def find(
    graph: Graph,
    block: int,
    others: Set[Any] = frozenset(),
    exact: Set[Any] = frozenset(),
    adds: Callable[[Any], bool] | None = None,
) -> list[FusionGroup]:
    """Every group of the model, for kernels with channels in blocks of `block`; no operator is in
    two of them, or has its variable among `others`. Those with variables in `exact` sum whole
    numbers, and have no epilogue, which might fold scales into weights. `adds` says of a variable
    whether it may be a residual; None: any."""
    taken, fused = set(others), []
    for node in graph.nodes:
        if node.var in others:
            continue
        group = None
        if node.op == "matmul":
            group = _product(node, graph)
        else:
            layer = convolutions.find(node, graph, block)
            if layer is not None:
                group = FusionGroup(
                    layer.core, layer.input, layer.weights, window=layer.window, nodes=layer.nodes
                )
        if group is None:
            continue
        group.exact, group.adds = node.var in exact, adds
        if not group.exact:
            _extend(group, graph, taken)
        taken.update(member.var for member in group.nodes)
        fused.append(group)
    return fused


def _product(node: Node, graph: Graph) -> FusionGroup | None:
    shape, weights = extents(node.args[0]), constant_of(node.args[1])
    if weights is None:
        return _product_with_variable(node, graph)
    if shape is None or weights.dtype != np.float32 or min(weights.ndim, len(shape)) < 2:
        return None
    *lead, k, n = weights.shape
    batch, rows = math.prod(lead), math.prod(shape[:-1])
    if batch > 1 and tuple(lead) != shape[:-2]:
        return None
    weights = weights.reshape(*([batch] if batch > 1 else []), k, n)
    core = GemmConfig(m=rows // batch, n=n, k=k, batch_count=batch)
    return FusionGroup(core, node.args[0], weights, nodes=[node])


def _product_with_variable(node: Node, graph: Graph) -> FusionGroup | None:
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
    if shape is None or other is None or node.var.ty.dtype != "float32":
        return None
    if len(shape) < 2 or shape[:-2] != other[:-2]:
        return None
    core = GemmConfig(m=shape[-2], n=other[-1], k=shape[-1], batch_count=math.prod(shape[:-2]))
    maker = graph.maker(second)
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


def _extend(group: FusionGroup, graph: Graph, taken: set[Any]) -> None:
    """Add operators to the epilogue as long as nothing else reads the values between."""
    while not group.epilogue or group.epilogue[-1] not in CASTS:
        user = graph.sole_user(group.answer)
        if user is not None and user.op == "nn.batch_norm" and set(group.epilogue) <= {BIAS}:
            first = graph.sole_user(user.var)
            if first is None or not _normalise(group, user):
                return
            group.nodes += [user, first]
            continue
        activation = None
        if not set(ACTIVATIONS) & set(group.epilogue):
            activation = activations.find(graph, group.answer)
        if activation is not None and not any(node.var in taken for node in activation[1]):
            group.epilogue.append(activation[0])
            group.nodes += activation[1]
        elif (
            user is not None
            and user.var not in taken
            and (
                _reshape(group, user)
                or _rectify(group, user)
                or _add(group, user)
                or _scale(group, user)
                or _cast(group, user)
            )
        ):
            group.nodes.append(user)
        else:
            return


def _normalise(group: FusionGroup, node: Node) -> bool:
    """Fold a batch normalisation into weights and bias, in double precision."""
    found = scale_and_shift(node) if isinstance(group.core, ConvConfig) else None
    if found is None or not _multiply(group, found[0]):
        return False
    before = 0.0 if group.bias is None else group.bias.astype(np.float64)
    _set_bias(group, (before + found[1]).astype(group.weights.dtype))
    return True


def _scale(group: FusionGroup, node: Node) -> bool:
    """Fold a product or quotient with a value for each channel into weights and bias."""
    values = constant_of(node.args[1]) if node.op in ("multiply", "divide") else None
    if node.op == "multiply" and values is None:
        values = constant_of(node.args[0])
    if values is None or group.weights is None or not set(group.epilogue) <= {BIAS}:
        return False
    found = _by_channel(group, node, values.astype(np.float64))
    if found is None or (node.op == "divide" and not np.all(found)):
        return False
    return _multiply(group, 1.0 / found if node.op == "divide" else found)


def _multiply(group: FusionGroup, scale: Any) -> bool:
    """Multiply the answer before its epilogue; False where the weights lack its channel axis."""
    channels: tuple[int, ...] = (1, -1)
    if isinstance(group.core, ConvConfig):
        transposed = group.core.direction is Direction.BACKWARD_DATA
        if transposed and group.core.group_count > 1:
            return False
        channels = (1, -1, 1, 1) if transposed else (-1, 1, 1, 1)
    kind = group.weights.dtype
    group.weights = (group.weights * scale.reshape(channels)).astype(kind)
    if group.bias is not None:
        group.bias = (group.bias * scale).astype(kind)
    return True


def _by_channel(group: FusionGroup, node: Node, values: Any) -> Any | None:
    """An operand with one value for each channel; None for any other."""
    shape = extents(group.answer)
    if shape is None or extents(node.var) != shape:
        return None
    axis = 1 if isinstance(group.core, ConvConfig) else len(shape) - 1
    given = (1,) * (len(shape) - values.ndim) + values.shape
    if any(extent != 1 for position, extent in enumerate(given) if position != axis):
        return None
    return np.array(np.broadcast_to(values.reshape(-1), (shape[axis],)))


def _set_bias(group: FusionGroup, values: Any) -> None:
    group.bias = values
    if BIAS not in group.epilogue:
        group.epilogue.insert(0, BIAS)


def _rectify(group: FusionGroup, node: Node) -> bool:
    """Make a value for each channel the factor of its negative values."""
    values = slopes.find(node)
    if values is None or set(ACTIVATIONS) & set(group.epilogue):
        return False
    group.slopes = _by_channel(group, node, values)
    if group.slopes is None:
        return False
    group.epilogue.append(PRELU)
    return True


def _add(group: FusionGroup, node: Node) -> bool:
    """Make a value for each channel the bias, a tensor of the answer's shape the residual."""
    if node.op != "add":
        return False
    other = node.args[1] if node.args[0].same_as(group.answer) else node.args[0]
    shape, functions = extents(group.answer), set(ACTIVATIONS) & set(group.epilogue)
    values = constant_of(other)
    if values is None:
        if group.residual is not None or other.same_as(group.answer) or extents(other) != shape:
            return False
        if group.adds is not None and not group.adds(other):
            return False
        group.residual = other
        group.epilogue.append(RESIDUAL)
        return True
    added = None if functions else _by_channel(group, node, values)
    if added is None or values.dtype != np.float32:
        return False
    _set_bias(group, added if group.bias is None else group.bias + added)
    return True


def _reshape(group: FusionGroup, node: Node) -> bool:
    """Whether the operator splits or joins the rows of a product: elementwise operators may follow
    it."""
    shape, found = extents(group.answer), extents(node.var)
    if node.op not in RESHAPES or not isinstance(group.core, GemmConfig):
        return False
    return bool(shape and found and shape[-1] == found[-1])


def _cast(group: FusionGroup, node: Node) -> bool:
    """Add a change of the answer's type to the epilogue."""
    if node.op != "astype":
        return False
    found = [name for name, kind in CASTS.items() if str(node.attrs.dtype) == kind]
    group.epilogue += found
    return bool(found)
