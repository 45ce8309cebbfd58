"""Finds the convolutions and products of a quantised model that are computed with whole numbers.
Imports TVM."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from typing import Any, TypeVar

import numpy as np
from tvm import relax

from tuna.configs import ConvConfig, GemmConfig
from tuna.configs.task import BIAS, TaskConfig
from tuna.configs.values import DataType
from tuna_models.compiler import byte_tables, convolutions, groups, integers, rules
from tuna_models.compiler.graph import Graph, Node, constant_of, extents
from tuna_models.compiler.groups import FusionGroup
from tuna_models.compiler.integer_groups import (
    Addition,
    IntegerGroup,
    IntegerGroups,
    Multiplication,
    Pair,
    Rounded,
)
from tuna_models.compiler.integers import Integers, Rounding

_Pair = TypeVar("_Pair", bound=Pair)
#: The reason why there is no kernel for a task, empty where there is one
Refusal = Callable[[TaskConfig], str]


def find(graph: Graph, block: int, refusal: Refusal) -> IntegerGroups:
    """Return the groups for kernels with channels in blocks of `block`; no operator is in two."""
    found = IntegerGroups(integers.find(graph))
    if not (found.integers.bases or found.integers.wide):
        return found
    finder = _Finder(graph, block, refusal, found)
    for node in graph.nodes:
        finder.core(node)
    for node in graph.nodes:
        finder.pair_alone(node)
    found.tables = byte_tables.find(graph, found, through=True)
    found.steps = byte_tables.find(graph, found, through=False)
    return found


@dataclass
class _Finder:
    graph: Graph
    block: int
    refusal: Refusal
    found: IntegerGroups
    taken: set[Any] = field(default_factory=set)

    def core(self, node: Node) -> None:
        """Add the group of a convolution or a product, or the reason why there is none."""
        source = node.args[0] if node.args else None
        if node.op not in groups.CORES or not isinstance(source, relax.Var):
            return
        if source in self.found.integers.wide:
            self.found.refused.append((node, "its activations have 16 bits"))
            return
        centered = _centered(source, self.graph.makers, self.found.integers)
        real = self.found.integers.grids
        if source not in real and centered is None:
            return
        group: IntegerGroup | str
        if node.op == "matmul":
            group = self._product(node, centered)
        else:
            group = self._convolution(node, centered)
        if isinstance(group, IntegerGroup):
            group = self._complete(group, dynamic=centered is not None)
        if isinstance(group, str):
            self.found.refused.append((node, group))
            return
        self.taken.update(member.var for member in group.nodes)
        self.found.groups.append(group)

    def pair_alone(self, node: Node) -> None:
        """Add a sum or a product of two tensors of bytes that is part of no group."""
        if node.op not in ("add", "multiply") or node.var in self.taken:
            return
        pair = self._addition(node) if node.op == "add" else self._multiplication(node)
        if pair is not None and pair.answer not in self.taken:
            self.taken.update(member.var for member in pair.nodes)
            self.found.pairs.append(pair)

    def _convolution(self, node: Node, centered: tuple[Any, Any] | None) -> IntegerGroup | str:
        if constant_of(node.args[1]) is None:
            return "both factors are variables"
        transposed = node.op.endswith("transpose")
        whole = integers.weights_of(self.graph.whole, node.args[1], int(transposed))
        if isinstance(whole, str):
            return whole
        layer = convolutions.find(node, self.graph, self.block, whole.numbers)
        if isinstance(layer, str):
            return layer
        if transposed and layer.interleaving is None:
            return "it is transposed, and its taps overlap"
        frames = layer.window is not None and layer.window.depth is not None
        if whole.zero is not None and (frames or layer.core.group_count > 1):
            return "it has groups or a depth, and its weights less their zero point need nine bits"
        scales, taken_off = whole.scales, whole.zero
        if layer.interleaving is not None:
            scales = layer.interleaving.repeated(scales)
            taken_off = None if taken_off is None else layer.interleaving.repeated(taken_off)
        scale, grid = 1.0, self.found.integers.grids.get(layer.input)
        if centered is None and grid is not None:
            centered, scale = (layer.input, grid.stored_zero), grid.scale
        if centered is None or (grid is None and not layer.input.same_as(node.args[0])):
            return "its input is no tensor of bytes"
        source, zero = centered
        around = None if isinstance(zero, relax.Var) else zero
        window = layer.window and replace(layer.window, value=around)
        return IntegerGroup(
            replace(layer.core, data_type=DataType.INT8),
            source,
            layer.weights.astype(np.int8),
            scale * scales,
            zero,
            weight_zero=taken_off,
            window=window,
            nodes=list(layer.nodes),
            interleaving=layer.interleaving,
        )

    def _product(self, node: Node, centered: tuple[Any, Any] | None) -> IntegerGroup | str:
        weights, shape = constant_of(node.args[1]), extents(node.args[0])
        if weights is None:
            return "both factors are variables"
        if shape is None or weights.ndim != 2 or len(shape) < 2:
            return "its weights are a batch of matrices"
        whole = integers.weights_of(self.graph.whole, node.args[1], 1)
        if isinstance(whole, str):
            return whole
        numbers, scales = whole.numbers.astype(np.int8), whole.scales
        k, n = weights.shape
        core = GemmConfig(m=math.prod(shape[:-1]), n=n, k=k, data_type=DataType.INT8)
        if centered is not None:
            source, zero = centered
        else:
            grid, source = self.found.integers.grids[node.args[0]], node.args[0]
            zero, scales = grid.stored_zero, grid.scale * scales
        return IntegerGroup(
            core, source, numbers, scales, zero, weight_zero=whole.zero, nodes=[node]
        )

    def _complete(self, group: IntegerGroup, *, dynamic: bool) -> IntegerGroup | str:
        """Add the operators that follow; the reason where no kernel takes the group."""
        if group.largest_sum > _LARGEST_SUM:
            return "its sums may be beyond 32 bits"
        if dynamic and not self._multiplied(group):
            return "its scale is not found"
        fp32 = self._in_fp32(group)
        if dynamic:
            found = [fp32]
        else:
            first = self._rounded(group)
            found = [first and self._with_addition(first), first, fp32]
        reason = "its scales are not finite"
        for choice in found:
            if choice is not None:
                reason = self.refusal(choice.task)
                if not reason:
                    return choice
        return reason

    def _multiplied(self, group: IntegerGroup) -> bool:
        """Add the cast of the sum to fp32 and its product with the scale of the input, which is
        known when the model runs."""
        cast, shape = self.graph.sole_user(group.answer), extents(group.answer)
        if cast is None or cast.op != "astype" or str(cast.attrs.dtype) != "float32":
            return False
        user = self.graph.sole_user(cast.var)
        if user is None or user.op != "multiply" or shape is None:
            return False
        first, second = user.args
        scale = second if first.same_as(cast.var) else first
        given = extents(scale) if isinstance(scale, relax.Var) else None
        if given is None or extents(user.var) != shape:
            return False
        columns = shape[-1] if isinstance(group.core, GemmConfig) else 1
        if math.prod(given) not in (1, columns) or math.prod(given) != (given or (1,))[-1]:
            return False
        group.scale = scale
        group.nodes += [cast, user]
        return True

    def _in_fp32(self, group: IntegerGroup) -> IntegerGroup | None:
        """Return the group with the epilogue of a group in fp32, which kernels for bytes write."""
        fused = _in_real_values(group)
        rules.extend(fused, self.graph, self.taken, rules.IN_FP32)
        return _whole_again(group, fused)

    def _rounded(self, group: IntegerGroup) -> IntegerGroup | None:
        """Return the group with bias, slopes, limits and rounding, None where it is not rounded."""
        fused = _in_real_values(group)
        rules.extend(fused, self.graph, self.taken, rules.FOLDED)
        rules.extend(fused, self.graph, self.taken, (rules.SLOPES,))
        ended = self._limited(fused.answer)
        if ended is None:
            return None
        rounded, nodes = ended
        fused.nodes += nodes
        return _whole_again(group, fused, rounded)

    def _limited(self, var: Any) -> tuple[Rounded, list[Node]] | None:
        """Return the rounding of a variable, and the operators to it."""
        low, high, nodes = -math.inf, math.inf, list[Node]()
        while True:
            user = self.graph.sole_user(var)
            if user is None or user.var in self.taken:
                return None
            rounding = self.found.integers.roundings.get(user.var)
            if rounding is not None:
                return _within(rounding, low, high), [*nodes, *rounding.nodes]
            limits = _limits(user)
            if limits is None:
                return None
            low = min(max(low, limits[0]), limits[1])
            high = max(min(high, limits[1]), limits[0])
            nodes.append(user)
            var = user.var

    def _with_addition(self, group: IntegerGroup) -> IntegerGroup | None:
        """Return the group with the sum of its bytes and others."""
        quantisation = self.graph.read_alone(group.answer)
        if quantisation is None:
            return None
        real = quantisation.vars[-1]
        add = self.graph.sole_user(real) if real in self.found.integers.grids else None
        addition = None if add is None or add.op != "add" else self._addition(add)
        if addition is None:
            return None
        if addition.second.same_as(real):
            addition = replace(
                addition,
                first=addition.second,
                second=addition.first,
                grids=addition.grids[::-1],
            )
        # a sum with itself has two arguments
        if addition.second.same_as(real):
            return None
        nodes = [*group.nodes, *self.graph.operators(quantisation), *addition.nodes]
        return replace(group, addition=addition, alone=group, nodes=nodes)

    def _addition(self, node: Node) -> Addition | None:
        real, (first, second) = self.found.integers.grids, node.args
        if first not in real or second not in real or extents(first) != extents(second):
            return None
        return self._pair(Addition, node, first, second)

    def _multiplication(self, node: Node) -> Multiplication | None:
        real = self.found.integers.grids
        if not all(isinstance(arg, relax.Var) and arg in real for arg in node.args):
            return None
        first, second = sorted(node.args, key=lambda arg: extents(arg) != extents(node.var))
        sizes, others = extents(first), extents(second)
        if sizes is None or others is None or sizes != extents(node.var):
            return None
        if others != sizes and others != (*sizes[:2], *[1] * (len(sizes) - 2)):
            return None
        return self._pair(Multiplication, node, first, second)

    def _pair(self, kind: type[_Pair], node: Node, first: Any, second: Any) -> _Pair | None:
        """What an operator makes of two tensors of bytes, if that is rounded next."""
        ended, real = self._limited(node.var), self.found.integers.grids
        if ended is None:
            return None
        rounded, nodes = ended
        return kind(first, second, (real[first], real[second]), rounded, [node, *nodes])


#: Largest sum of products that 32 bits hold
_LARGEST_SUM = (1 << 31) - 1


def _centered(source: Any, makers: Mapping[Any, Node], found: Integers) -> tuple[Any, Any] | None:
    """The whole numbers of which an operator of int32 is summed, and the zero point that is taken
    off them, as a variable or as the byte that stands for it."""
    if str(source.ty.dtype) != "int32":
        return None
    maker, zero = makers.get(source), None
    if maker is not None and maker.op == "subtract":
        source, zero = maker.args
    if not isinstance(source, relax.Var) or source not in found.bases or source in found.grids:
        return None
    if isinstance(zero, relax.Var):
        return (source, zero) if extents(zero) in ((), (1,)) else None
    values = np.zeros(()) if zero is None else constant_of(zero)
    if values is None or values.size != 1:
        return None
    return source, float(values.item()) + 128.0 * found.signed[found.bases[source]]


def _in_real_values(group: IntegerGroup) -> FusionGroup:
    """The group as one in fp32, whose epilogue operators extend; its weights are the scales, which
    is all that operators change of them."""
    channels = (-1, 1, 1, 1) if isinstance(group.core, ConvConfig) else (1, -1)
    scales = group.scales.reshape(channels)
    return FusionGroup(
        group.core,
        group.input,
        scales,
        nodes=list(group.nodes),
        interleaving=group.interleaving,
    )


def _whole_again(
    group: IntegerGroup, fused: FusionGroup, rounded: Rounded | None = None
) -> IntegerGroup | None:
    """The group with what operators have made of its scales; None where these are no numbers any
    more."""
    scales = fused.weights.reshape(-1)
    if not np.all(np.isfinite(scales)):
        return None
    return replace(
        group,
        scales=scales,
        others=tuple(part for part in fused.epilogue if part != BIAS),
        added=fused.added,
        nodes=fused.nodes,
        rounded=rounded,
    )


def _limits(node: Node) -> tuple[float, float] | None:
    """The limits that an operator keeps values within, None for another operator."""
    if node.op == "nn.relu":
        return 0.0, math.inf
    if node.op == "nn.relu6":
        return 0.0, 6.0
    if node.op == "clip":
        low, high = (float(getattr(limit, "value", np.nan)) for limit in node.args[1:])
        return None if low != low or high != high else (low, high)
    if node.op in ("maximum", "minimum"):
        values = constant_of(node.args[1])
        if values is None or values.size != 1:
            return None
        value = float(values.item())
        return (value, math.inf) if node.op == "maximum" else (-math.inf, value)
    return None


def _within(rounding: Rounding, low: float, high: float) -> Rounded:
    grid = rounding.grid
    return Rounded(rounding.grid, float(grid.stored(low)), float(grid.stored(high)))
