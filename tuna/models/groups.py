"""Finds the convolutions and matrix products of a model, each with what can be done before its answer is written."""

from __future__ import annotations

import math
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from tuna.configs import ConvConfig, GemmConfig
from tuna.configs.task import BIAS, RELU, RELU6, RESIDUAL, TaskConfig
from tuna.models.graph import Graph, Node, constant_of, extents


@dataclass
class Group:
    """A core with its weights, and the operators that became its epilogue."""

    core: ConvConfig | GemmConfig
    input: Any  #: the variable that it reads
    weights: Any  #: a convolution: K, C/groups, R, S; a product: K x N
    bias: Any = None  #: a value for each output channel
    residual: Any = None  #: the variable that is added
    limit: str = ""  #: RELU, RELU6 or nothing
    nodes: list[Node] = field(default_factory=list)  #: of the model, in order; the last one's variable is the answer

    @property
    def answer(self) -> Any:
        """The variable that the group computes."""
        return self.nodes[-1].var

    @property
    def task(self) -> TaskConfig:
        """The group as a config, for a model whose tensors are in blocks."""
        has = {BIAS: self.bias is not None, RESIDUAL: self.residual is not None}
        parts = [part for part, there in has.items() if there] + ([self.limit] if self.limit else [])
        return TaskConfig(core=self.core, layouts="native", epilogue=tuple(parts))


def find(graph: Graph) -> list[Group]:
    """Every group of the model; no operator is in two of them."""
    taken: set[Any] = set()
    found = []
    for node in graph.nodes:
        group = _convolution(node) if node.op == "nn.conv2d" else _product(node) if node.op == "matmul" else None
        if group is None:
            continue
        if isinstance(group.core, ConvConfig):
            _extend(group, graph, taken)
        taken.update(member.var for member in group.nodes)
        found.append(group)
    return found


def _convolution(node: Node) -> Group | None:
    attrs, shape = node.attrs, extents(node.args[0])
    weights = constant_of(node.args[1])
    pads = [int(pad) for pad in attrs.padding]
    if weights is None or shape is None or weights.dtype != np.float32 or len(shape) != 4:
        return None
    if (attrs.data_layout, attrs.kernel_layout, attrs.out_layout) != ("NCHW", "OIHW", "NCHW") or pads[:2] != pads[2:]:
        return None
    (sh, sw), (dh, dw) = ((int(a), int(b)) for a, b in (attrs.strides, attrs.dilation))
    core = ConvConfig(
        batchsize=shape[0],
        in_channels=shape[1],
        in_h=shape[2],
        in_w=shape[3],
        out_channels=weights.shape[0],
        fil_h=weights.shape[2],
        fil_w=weights.shape[3],
        pad_h=pads[0],
        pad_w=pads[1],
        conv_stride_h=sh,
        conv_stride_w=sw,
        dilation_h=dh,
        dilation_w=dw,
        group_count=int(attrs.groups),
    )
    return Group(core, node.args[0], weights, nodes=[node])


def _product(node: Node) -> Group | None:
    shape, weights = extents(node.args[0]), constant_of(node.args[1])
    if weights is None or shape is None or weights.dtype != np.float32 or weights.ndim != 2 or len(shape) < 2:
        return None
    rows = math.prod(shape[:-1])
    return Group(GemmConfig(m=rows, n=weights.shape[1], k=weights.shape[0]), node.args[0], weights, nodes=[node])


def _extend(group: Group, graph: Graph, taken: set[Any]) -> None:
    """Take up operators as long as each reads only the one before."""
    while group.limit != RELU6:
        user = graph.sole_user(group.answer)
        if user is None or user.var in taken:
            return
        if user.op == "nn.batch_norm" and group.residual is None and not group.limit:
            first = graph.sole_user(user.var)
            if first is None or not _normalise(group, user):
                return
            group.nodes += [user, first]
            continue
        if not (_add(group, user) or _limit(group, user)):
            return
        group.nodes.append(user)


def _normalise(group: Group, node: Node) -> bool:
    """Fold a batch normalisation into weights and bias, in double precision."""
    attrs = node.attrs
    parts = [constant_of(arg) for arg in node.args[1:]]
    if int(attrs.axis) != 1 or any(part is None for part in parts):
        return False
    gamma, beta, mean, variance = (np.asarray(part, np.float64) for part in parts)
    scale = (gamma if attrs.scale else 1.0) / np.sqrt(variance + float(attrs.epsilon))
    before = 0.0 if group.bias is None else group.bias.astype(np.float64)
    group.bias = ((before - mean) * scale + (beta if attrs.center else 0.0)).astype(np.float32)
    group.weights = (group.weights * scale[:, None, None, None]).astype(np.float32)
    return True


def _add(group: Group, node: Node) -> bool:
    """A value for each channel becomes bias, a tensor of the answer's shape the residual."""
    if node.op != "add" or group.limit:
        return False
    other = node.args[1] if node.args[0].same_as(group.answer) else node.args[0]
    shape = extents(group.answer)
    values = constant_of(other)
    if values is None:
        if group.residual is not None or other.same_as(group.answer) or extents(other) != shape:
            return False
        group.residual = other
        return True
    channels = group.weights.shape[0]
    if values.dtype != np.float32 or values.size not in (1, channels):
        return False
    if values.size > 1 and values.shape not in ((channels, 1, 1), (1, channels, 1, 1)):
        return False
    added = np.broadcast_to(values.reshape(-1), (channels,))
    group.bias = np.array(added) if group.bias is None else group.bias + added
    return True


def _limit(group: Group, node: Node) -> bool:
    """A ReLU, or both in one or one after the other: what is below 0 cut, and what is above 6."""
    bounds = _bounds(node)
    found = None if bounds is None else {(0.0, math.inf): RELU, (0.0, 6.0): RELU6}.get(bounds)
    if group.limit:
        found = RELU6 if bounds in ((-math.inf, 6.0), (0.0, 6.0)) else None
    group.limit = found or group.limit
    return found is not None


def _bounds(node: Node) -> tuple[float, float] | None:
    """Between which values an operator cuts, None for one that does something else."""
    if node.op == "nn.relu":
        return 0.0, math.inf
    if node.op == "nn.relu6":
        return 0.0, 6.0
    if node.op == "clip":
        low, high = (float(getattr(arg, "value", arg)) for arg in node.args[1:])
        return low, high
    if node.op in ("maximum", "minimum"):
        values = constant_of(node.args[1])
        if values is not None and values.size == 1:
            cut = float(values.reshape(-1)[0])
            return (cut, math.inf) if node.op == "maximum" else (-math.inf, cut)
    return None
