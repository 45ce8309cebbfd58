"""Finds attention: the product of queries and keys, softmax, and the product with values, however
they are written. Imports TVM.

Scales before and behind the first product are one, and summands of the scores are the mask
(`scores.py`). Reshapes and transpositions of heads before and behind are orders of axes (`axes.py`)
in which the kernel reads and writes.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence, Set
from dataclasses import dataclass, field
from typing import Any

from tvm import relax

from tuna.configs import AttentionConfig, GemmConfig, TaskConfig
from tuna.configs.attention import AXES, FUSED, PARTS, SCORES
from tuna.libraries.tvm import problems
from tuna.libraries.tvm.kernels.attention_space import KEY_CYCLES
from tuna.libraries.tvm.kernels.shape import Mode
from tuna_models.compiler.axes import Axis, Part, axis_of, layout, merged, moved, named, without
from tuna_models.compiler.graph import RESHAPES, Graph, Node, constant_of, extents
from tuna_models.compiler.groups import MASKS, VALUES, ZEROED, FusionGroup
from tuna_models.compiler.rules import Change, Rule, Unfit, applied
from tuna_models.compiler.scores import Walk, factor_of, scaled

#: Relative difference from one over the root of the width that rounding makes of a scale
_ROUNDED = 1e-7
#: Cycles that softmax takes for a vector, and a call of a function, measured
_SOFTMAX_CYCLES, _CALL_CYCLES = 25.0, 1000.0
#: Values of a vector
_VECTOR = 16
#: Places of keys and values among what an attention reads
_KEYS, _VALUES = 1, 2


@dataclass(frozen=True)
class _Source:
    """The value that an operand of a product is read from."""

    leaf: Any
    layout: str
    scale: float
    times: int  #: how often each head is repeated
    nodes: list[Node]  #: operators between


@dataclass(frozen=True)
class _Attention(Change):
    """A product that becomes an attention."""

    core: AttentionConfig | None = None
    sources: tuple[Any, ...] = ()  #: queries and keys
    added: Mapping[str, Any] = field(default_factory=dict)  #: see `FusionGroup.added`
    inside: Sequence[Node] = ()  #: operators before the first product and behind the second


class Attend(Rule):
    """The product of two variables that begins an attention."""

    def __init__(self, graph: Graph, target: Any, taken: Set[Any]) -> None:
        """`taken` are variables of operators that may not become part of an attention."""
        self._graph, self._target, self._taken = graph, target, taken
        self._known = dict[Any, float | None]()

    def match(self, group: FusionGroup, graph: Graph) -> tuple[list[Node], Any] | None:
        """Softmax, whose label a reason gets, and the operators between the products."""
        scores = extents(group.answer)
        if group.weights is not None or group.exact or group.answer in self._taken:
            return None
        if scores is None:
            return None
        walk = Walk(graph, group.answer, self._axes(group.nodes[0], scores))
        if walk.softmax is None:
            return None
        others = [node for node in walk.nodes if node is not walk.softmax]
        return [walk.softmax, *others], walk

    def check(self, group: FusionGroup, nodes: Sequence[Node], operand: Any) -> Change:
        """The attention."""
        walk, product = operand, group.core
        assert isinstance(walk, Walk)
        assert isinstance(product, GemmConfig)
        if walk.obstacle or walk.last is None:
            raise Unfit(walk.obstacle)
        first, second = group.nodes[0], walk.last
        scores, values = extents(first.var), extents(second.args[1])
        assert scores is not None
        *lead, _, _ = self._axes(first, scores)
        heads = walk.axes[:-2]
        lengths = [math.prod(part.extent for part in axis) for axis in heads]
        if values is None or [*values[:-2]] != lengths:
            raise Unfit("its values are of other heads")
        every = merged([part for axis in lead for part in axis]) or ()
        sizes = {part.letter: part.extent for part in every}
        if not set(sizes) <= set("BH"):
            raise Unfit("its heads are of more than two axes")
        queries, keys, width, value_width = scores[-2], scores[-1], product.k, values[-1]
        rows, columns = axis_of("S", queries), axis_of("S", keys)
        q, k, v = self._sources(
            (first.args[0], [*lead, rows, axis_of("D", width)]),
            (first.args[1], [*lead, axis_of("D", width), columns]),
            (second.args[1], [*heads, columns, axis_of("D", value_width)]),
            {first.var, second.var},
        )
        if q.times > 1 or k.times != v.times:
            raise Unfit("its keys are of other heads than its values")
        axes = [*heads, rows, axis_of("D", value_width)]
        order, moves = self._answer(second.var, axes, fixed=walk.zeroed is not None)
        scale, usual = walk.scale * q.scale * k.scale, float(width) ** -0.5
        core = AttentionConfig(
            batch_count=sizes.get("B", 1),
            heads=sizes.get("H", 1),
            queries=queries,
            keys=keys,
            width=width,
            value_width=value_width,
            kv_heads=sizes.get("H", 1) // k.times,
            scale=usual if abs(scale / usual - 1.0) < _ROUNDED else scale,
            mask="".join(axis for axis in SCORES if any(axis in mask.axes for mask in walk.masks)),
            causal=walk.causal,
            zero_rows=walk.zero_rows,
            q_layout=q.layout,
            k_layout=k.layout,
            v_layout=v.layout,
            y_layout=order,
        )
        self._compare(core, product)
        inside = [*{node.var: node for node in (*q.nodes, *k.nodes, *v.nodes)}.values(), *moves]
        added = {VALUES: v.leaf, MASKS: walk.masks}
        added |= {} if walk.zeroed is None else {ZEROED: walk.zeroed}
        return _Attention("", None, None, core, (q.leaf, k.leaf), added, inside)

    def apply(self, group: FusionGroup, change: Change) -> None:
        """Make the group the attention."""
        assert isinstance(change, _Attention)
        assert change.core is not None
        group.core, group.order = change.core, None
        group.input, group.other = change.sources
        group.added = {**change.added}
        group.nodes += change.inside

    def _axes(self, product: Node, scores: Sequence[int]) -> list[Axis]:
        """The axes of the scores; one before queries and keys may be batch and heads, as a reshape
        before or behind the product tells."""
        axes, (first, *_) = named(scores, SCORES), product.args
        maker, user = self._graph.makers.get(first), self._graph.sole_user(product.var)
        others = [extents(maker.args[0])] if maker and maker.op in RESHAPES else []
        others += [extents(user.var)] if user and user.op in RESHAPES else []
        for shape in others:
            if len(scores) == len("HQK") and shape and len(shape) == len(SCORES):
                batch, heads, *_ = shape
                if batch * heads == scores[0]:
                    axes[0] = [*axis_of("B", batch), *axis_of("H", heads)]
        return axes

    def _compare(self, core: AttentionConfig, product: GemmConfig) -> None:
        """Raise Unfit where no kernel takes the attention, or its products and softmax are expected
        to take less time."""
        whole = self._cycles(core)
        if whole is None:
            raise Unfit("no kernel of the target takes its attention")
        count = core.batch_count * core.heads
        second = GemmConfig(core.queries, core.value_width, core.keys, count)
        parts = [self._cycles(each) for each in (product, second)]
        around = count * core.queries * math.ceil(core.keys / _VECTOR) * _SOFTMAX_CYCLES
        around += KEY_CYCLES * core.batch_count * core.kv_heads * core.keys * core.width
        around = around / int(self._target.attrs.get("num-cores", 1)) + 2 * _CALL_CYCLES
        if whole > sum(cycles or math.inf for cycles in parts) + around:
            raise Unfit("it is expected to take longer than its products and softmax")

    def _cycles(self, core: AttentionConfig | GemmConfig) -> float | None:
        """The estimate of the best kernel, None if there is none; kept, as layers are alike."""
        if core not in self._known:
            self._known[core] = self._estimate(core)
        return self._known[core]

    def _estimate(self, core: AttentionConfig | GemmConfig) -> float | None:
        task = TaskConfig(core=core, layouts=Mode.LAYER.value)
        layer = problems.layer_of(task, Mode.LAYER, self._target)
        if layer is None or not (points := problems.ranked(layer)):
            return None
        family, index = points[0]
        return problems.estimate(family, layer, family.kernel.space(layer)[index])

    def _sources(
        self,
        q: tuple[Any, list[Axis]],
        k: tuple[Any, list[Axis]],
        v: tuple[Any, list[Axis]],
        products: Set[Any],
    ) -> list[_Source]:
        """The values that queries, keys and values are read from: first together, as they may be
        parts of one tensor; if something else reads what lies between, each by itself."""
        for shared in (True, False):
            found = [
                self._source(place, *each, shared=shared) for place, each in enumerate((q, k, v))
            ]
            inside = {node.var for source in found for node in source.nodes}
            users = [user.var for var in inside for user in self._graph.users.get(var, [])]
            if inside.union(products).issuperset(users):
                break
        return found

    def _source(self, place: int, leaf: Any, axes: list[Axis], *, shared: bool) -> _Source:
        """The value that queries, keys or values (`place`) are read from: the first of those that
        become it, each read by nothing else unless they may be `shared`."""
        found, scale, times, nodes = None, 1.0, 1, list[Node]()
        while True:
            letters = FUSED + AXES if any(p.letter == FUSED for a in axes for p in a) else AXES
            order = layout(axes, letters)
            if order is not None and (place == _KEYS or order.endswith("D")):
                found = _Source(leaf, order, scale, times, [*nodes])
            node = self._graph.makers.get(leaf)
            if node is None or leaf in self._taken or self._graph.is_result(leaf):
                break
            if not shared and self._graph.sole_user(leaf) is None:
                break
            whole = self._whole(node, axes, place) if letters == AXES else None
            alone = [self._graph.sole_user(part.var) for part in (whole[2] if whole else ())]
            if whole is not None and (shared or None not in alone):
                leaf, axes, parts = whole
                nodes += parts
                continue
            factor = factor_of(node) if place != _VALUES else None
            before = moved(node, axes, back=True)
            if node.op == "broadcast_to" and times == 1:
                fewer = without(axes, extents(node.args[0]) or (), "H")
                before, times = (None, 1) if fewer is None else fewer
            if factor is not None:
                leaf, scale = scaled(node), scale * factor
            elif before is not None:
                leaf, axes = node.args[0], before
            elif node.op == "astype" and node.args[0].ty.dtype == leaf.ty.dtype:
                leaf = node.args[0]
            else:
                break
            nodes.append(node)
        if found is None:
            raise Unfit("its operands are in an order that no kernel reads")
        return found

    def _whole(
        self, node: Node, axes: list[Axis], place: int
    ) -> tuple[Any, list[Axis], list[Node]] | None:
        """The tensor of queries, keys and values of which an operator takes the part at a place,
        its axes, and the operators; None for others."""
        fused = Part(FUSED, PARTS)
        if node.op == "take" and node.attrs.axis is not None:
            index, shape = constant_of(node.args[1]), extents(node.args[0])
            axis = int(node.attrs.axis)
            if index is None or index.ndim or int(index) != place or shape is None or axis < 0:
                return None
            before = [*axes[:axis], [fused], *axes[axis:]]
            return (node.args[0], before, [node]) if shape[axis] == PARTS else None
        if not isinstance(node.value, relax.TupleGetItem) or int(node.value.index) != place:
            return None
        split = self._graph.makers.get(node.value.tuple_value)
        if split is None or split.op != "split":
            return None
        source, part = extents(split.args[0]), extents(node.var)
        if source is None or part is None:
            return None
        axis = int(split.attrs.axis) % len(source)
        if source[axis] != PARTS * part[axis] or len(split.var.ty.fields) != PARTS:
            return None
        return split.args[0], [*axes[:axis], [fused, *axes[axis]], *axes[axis + 1 :]], [node, split]

    def _answer(self, var: Any, axes: list[Axis], *, fixed: bool) -> tuple[str, list[Node]]:
        """The order in which the answer is written, and the operators that make it; it stays as it
        is where it is `fixed`."""
        order, kept, nodes = layout(axes, AXES), list[Node](), list[Node]()
        if order is None or not order.endswith("D"):
            raise Unfit("its answer is in an order that no kernel writes")
        while not fixed and (user := self._graph.sole_user(var)) is not None:
            after = None if user.var in self._taken else moved(user, axes)
            if after is None:
                break
            nodes.append(user)
            var, axes = user.var, after
            found = layout(axes, AXES)
            if found is not None and found.endswith("D"):
                order, kept = found, [*nodes]
        return order, kept


def with_attention(
    groups: Sequence[FusionGroup], graph: Graph, target: Any, taken: Set[Any]
) -> list[FusionGroup]:
    """The groups, where those of an attention's products become one. `taken` are variables of
    operators that are part of others, or may not become part of one."""
    rule, inside = Attend(graph, target, taken), set[Any]()
    places, whole = {var: place for place, var in enumerate(graph.makers)}, list[FusionGroup]()
    for group in groups:
        if applied(rule, group, graph, taken):
            group.nodes.sort(key=lambda node: places[node.var])
            inside.update(node.var for node in group.nodes)
            whole.append(group)
    return [each for each in groups if each in whole or each.answer not in inside]
