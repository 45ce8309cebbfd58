"""Rules by which operators behind a convolution or product become part of it. Imports TVM.

Each matches operators, checks them, which fails with a reason, and adds them to a group.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Sequence, Set
from dataclasses import dataclass
from typing import Any

import numpy as np

from tuna.configs import ConvConfig, GemmConfig
from tuna.configs.task import ACTIVATIONS, AFFINE, BIAS, CASTS, PRELU, RESIDUAL
from tuna.configs.values import DataType, Direction
from tuna_models.compiler import activations, slopes
from tuna_models.compiler.graph import RESHAPES, Graph, Node, constant_of, extents, scale_and_shift
from tuna_models.compiler.groups import FusionGroup
from tuna_models.compiler.integer_groups import IntegerGroups


class Unfit(Exception):
    """The reason why operators do not become part of a group."""


@dataclass(frozen=True)
class Change:
    """The changes that operators make to a group."""

    step: str = ""  #: step of the epilogue; a bias becomes another one
    operand: Any = None  #: what the step reads
    weights: Any = None  #: weights in the place of the group's


class Rule(ABC):
    """A way to make operators part of a group."""

    def match(self, group: FusionGroup, graph: Graph) -> tuple[list[Node], Any] | None:
        """Return the operators that alone read the group's answer, with what distinguishes them;
        None where it is about others."""
        user = graph.sole_user(group.answer)
        operand = None if user is None else self.operand(user, group)
        return None if user is None or operand is None else ([user], operand)

    def operand(self, node: Node, group: FusionGroup) -> Any:
        """The operand that an operator applies to the group's answer; None for others."""
        return None

    @abstractmethod
    def check(self, group: FusionGroup, nodes: Sequence[Node], operand: Any) -> Change:
        """Return what changes; raises Unfit."""

    def apply(self, group: FusionGroup, change: Change) -> None:
        """Change the group. A bias comes before all other steps."""
        step = change.step
        if change.weights is not None:
            group.weights = change.weights
        if change.operand is not None:
            group.added[step] = change.operand
        if step and (step != BIAS or BIAS not in group.epilogue):
            group.epilogue.insert(0 if step == BIAS else len(group.epilogue), step)


class Normalise(Rule):
    """Fold a batch normalisation into weights and bias, in double precision."""

    def match(self, group: FusionGroup, graph: Graph) -> tuple[list[Node], Any] | None:
        """The normalisation, and the operator that takes its first result."""
        user = graph.sole_user(group.answer)
        if user is None or user.op != "nn.batch_norm":
            return None
        first = graph.sole_user(user.var)
        return None if first is None else ([user, first], user)

    def check(self, group: FusionGroup, nodes: Sequence[Node], operand: Any) -> Change:
        """The weights and the bias."""
        if not set(group.epilogue) <= {BIAS}:
            raise Unfit("other steps come before it")
        numbers = scale_and_shift(operand) if isinstance(group.core, ConvConfig) else None
        if numbers is None:
            raise Unfit("its parameters are no constants for each channel of a convolution")
        scale, shift = map(group.repeated, numbers)
        weights, bias = _scaled(group, scale)
        before = 0.0 if bias is None else bias.astype(np.float64)
        return Change(BIAS, (before + shift).astype(weights.dtype), weights)


class Activate(Rule):
    """A function of each value, however it is written."""

    def match(self, group: FusionGroup, graph: Graph) -> tuple[list[Node], Any] | None:
        """The operators of the function, and its name."""
        activation = None if _is_active(group) else activations.find(graph, group.answer)
        return None if activation is None else (activation[1], activation[0])

    def check(self, group: FusionGroup, nodes: Sequence[Node], operand: Any) -> Change:
        """The step."""
        return Change(operand)


class Reshape(Rule):
    """Rows of a product that are split or joined: operators on single values may follow."""

    def operand(self, node: Node, group: FusionGroup) -> Any:
        """The new shape."""
        return extents(node.var) if node.op in RESHAPES else None

    def check(self, group: FusionGroup, nodes: Sequence[Node], operand: Any) -> Change:
        """Nothing: only the order of values counts."""
        shape = extents(group.answer)
        if not isinstance(group.core, GemmConfig) or not shape or not operand:
            raise Unfit("it changes the shape of what is no product")
        if shape[-1] != operand[-1]:
            raise Unfit("it changes the columns of a product")
        return Change()


class Rectify(Rule):
    """A factor of the negative values of each channel."""

    def operand(self, node: Node, group: FusionGroup) -> Any:
        """The factors."""
        return slopes.find(node)

    def check(self, group: FusionGroup, nodes: Sequence[Node], operand: Any) -> Change:
        """The slopes."""
        if _is_active(group):
            raise Unfit("an activation comes before it")
        return Change(PRELU, _by_channel(group, nodes[0], operand))


class Bias(Rule):
    """A constant summand of each channel."""

    def operand(self, node: Node, group: FusionGroup) -> Any:
        """The summand."""
        return constant_of(_other(node, group)) if node.op == "add" else None

    def check(self, group: FusionGroup, nodes: Sequence[Node], operand: Any) -> Change:
        """The bias."""
        if _is_active(group) or AFFINE in group.epilogue:
            raise Unfit("an activation or a factor comes before it")
        if operand.dtype != np.float32:
            raise Unfit(f"what it adds is {operand.dtype}")
        values = _by_channel(group, nodes[0], operand)
        return Change(BIAS, group.added[BIAS] + values if BIAS in group.added else values)


class Residual(Rule):
    """A variable summand of the answer's shape."""

    def operand(self, node: Node, group: FusionGroup) -> Any:
        """The variable."""
        other = _other(node, group) if node.op == "add" else None
        return None if other is None or constant_of(other) is not None else other

    def check(self, group: FusionGroup, nodes: Sequence[Node], operand: Any) -> Change:
        """The residual."""
        if RESIDUAL in group.added:
            raise Unfit("a residual is added already")
        if group.interleaving is not None:
            raise Unfit("its channels become rows and columns behind the epilogue")
        if operand.same_as(group.answer) or extents(operand) != extents(group.answer):
            raise Unfit("what it adds has another shape")
        if group.adds is not None and not group.adds(operand):
            raise Unfit("what it adds is not stored in bf16")
        return Change(RESIDUAL, operand)


class Scale(Rule):
    """A constant factor or divisor of each channel, folded into weights and bias."""

    def operand(self, node: Node, group: FusionGroup) -> Any:
        """The factor or divisor."""
        if node.op not in ("multiply", "divide"):
            return None
        values = constant_of(node.args[1])
        return constant_of(node.args[0]) if values is None and node.op == "multiply" else values

    def check(self, group: FusionGroup, nodes: Sequence[Node], operand: Any) -> Change:
        """The weights and the bias."""
        if group.weights is None:
            raise Unfit("both factors of the product are variables")
        if not set(group.epilogue) <= {BIAS}:
            raise Unfit("other steps come before it")
        factors = _by_channel(group, nodes[0], operand.astype(np.float64))
        if nodes[0].op == "divide":
            if not np.all(factors):
                raise Unfit("it divides by zero")
            factors = 1.0 / factors
        weights, bias = _scaled(group, factors)
        return Change("" if bias is None else BIAS, bias, weights)


class Cast(Rule):
    """A change of the answer's type, which ends the epilogue."""

    def operand(self, node: Node, group: FusionGroup) -> Any:
        """The type."""
        return str(node.attrs.dtype) if node.op == "astype" else None

    def check(self, group: FusionGroup, nodes: Sequence[Node], operand: Any) -> Change:
        """The step."""
        steps = [name for name, kind in CASTS.items() if kind == operand]
        if not steps:
            raise Unfit(f"no kernel writes {operand}")
        return Change(steps[0])


class Affine(Rule):
    """A constant factor, a constant summand, or the one and then the other, of each channel behind
    an activation or a residual."""

    def operand(self, node: Node, group: FusionGroup) -> Any:
        """The factor or summand."""
        behind = not set(group.epilogue) <= {BIAS} and node.op in ("multiply", "add")
        return constant_of(_other(node, group)) if behind else None

    def check(self, group: FusionGroup, nodes: Sequence[Node], operand: Any) -> Change:
        """The factor and the summand."""
        (node,), kind = nodes, group.core.data_type
        if kind is DataType.INT8 or operand.dtype != np.float32:
            raise Unfit("no kernel applies it behind other steps")
        values = _by_channel(group, node, operand)
        if AFFINE not in group.epilogue:
            plain = np.ones_like(values), np.zeros_like(values)
            return Change(
                AFFINE, (values, plain[1]) if node.op == "multiply" else (plain[0], values)
            )
        if node.op == "multiply" or group.epilogue[-1] != AFFINE or group.added["shift"].any():
            raise Unfit("a factor or summand comes before it")
        return Change(AFFINE, (group.added["scale"], values))

    def apply(self, group: FusionGroup, change: Change) -> None:
        """Add the step, or give it a summand."""
        group.added["scale"], group.added["shift"] = change.operand
        if AFFINE not in group.epilogue:
            group.epilogue.append(AFFINE)


NORMALISE, RESHAPE, SLOPES, BIASES = Normalise(), Reshape(), Rectify(), Bias()
#: Rules of what becomes part of constants
FOLDED = (NORMALISE, RESHAPE, BIASES)
#: Rules of kernels that write fp32, and all rules, in the order in which they are tried: summands
#: and factors may be the beginning of an activation
IN_FP32 = (NORMALISE, Activate(), RESHAPE, SLOPES, BIASES, Residual(), Scale(), Affine())
RULES = (*IN_FP32, Cast())


def with_epilogues(
    groups: Sequence[FusionGroup], graph: Graph, bytes_of: IntegerGroups
) -> Sequence[FusionGroup]:
    """Extend groups by operators that are not part of another group, nor of one of bytes. Sums of
    whole numbers have no epilogue, which might fold scales into weights."""
    taken = bytes_of.taken | {node.var for group in groups for node in group.nodes}
    for group in groups:
        if not group.exact:
            extend(group, graph, taken)
            taken.update(node.var for node in group.nodes)
    return groups


def extend(
    group: FusionGroup, graph: Graph, taken: Set[Any], rules: Sequence[Rule] = RULES
) -> None:
    """Add operators to the group as long as nothing else reads the values between, and they are not
    among those `taken`; the reason of the last one that is not added is kept."""
    while not group.epilogue or group.epilogue[-1] not in CASTS:
        if not any(applied(rule, group, graph, taken) for rule in rules):
            return


def applied(rule: Rule, group: FusionGroup, graph: Graph, taken: Set[Any]) -> bool:
    """Make operators part of a group by a rule, if it applies; else the reason is kept."""
    match = rule.match(group, graph)
    if match is None or any(node.var in taken for node in match[0]):
        return False
    nodes, operand = match
    try:
        change = rule.check(group, nodes, operand)
    except Unfit as reason:
        group.reasons[nodes[0].label] = str(reason)
        return False
    rule.apply(group, change)
    group.nodes += nodes
    for node in nodes:
        group.reasons.pop(node.label, None)
    return True


def _is_active(group: FusionGroup) -> bool:
    return not set(ACTIVATIONS).isdisjoint(group.epilogue)


def _other(node: Node, group: FusionGroup) -> Any:
    """The value that an operator combines with the group's answer."""
    return node.args[1] if node.args[0].same_as(group.answer) else node.args[0]


def _by_channel(group: FusionGroup, node: Node, values: Any) -> Any:
    """An operand with one value for each channel of the core; raises Unfit for any other."""
    shape = extents(group.answer)
    if shape is None or extents(node.var) != shape:
        raise Unfit("it changes the shape")
    axis = 1 if isinstance(group.core, ConvConfig) else len(shape) - 1
    given = (1,) * (len(shape) - values.ndim) + values.shape
    if any(extent != 1 for position, extent in enumerate(given) if position != axis):
        raise Unfit("its constant has several values for a channel")
    return group.repeated(np.array(np.broadcast_to(values.reshape(-1), (shape[axis],))))


def _scaled(group: FusionGroup, scale: Any) -> tuple[Any, Any]:
    """The weights and the bias by which the answer before the epilogue is multiplied; raises Unfit
    where the weights lack the answer's channel axis."""
    channels: tuple[int, ...] = (1, -1)
    if isinstance(group.core, ConvConfig):
        transposed = group.core.direction is Direction.BACKWARD_DATA
        if transposed and group.core.group_count > 1:
            raise Unfit("it follows a transposed convolution with groups")
        channels = (1, -1, 1, 1) if transposed else (-1, 1, 1, 1)
    kind, bias = group.weights.dtype, group.added.get(BIAS)
    weights = (group.weights * scale.reshape(channels)).astype(kind)
    return weights, None if bias is None else (bias * scale).astype(kind)
