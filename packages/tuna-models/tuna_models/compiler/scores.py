"""The operators between the two products of an attention: scales, masks and softmax. Imports
TVM."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from tuna.configs.attention import SCORES
from tuna_models.compiler.axes import Axis, axis_of, merged, moved
from tuna_models.compiler.graph import RESHAPES, Graph, Node, constant_of, extents

#: Number in the place of hidden scores, to which fp32 adds a usual score without a change
_HIDDEN = -1e9


@dataclass(frozen=True)
class Mask:
    """A summand of the scores."""

    operand: Any
    axes: str  #: letters of `SCORES`; its other axes have an extent of 1
    #: what is added where the operand is true, and where it is false; None: the operand itself
    values: tuple[float, float] | None = None


@dataclass
class Walk:
    """The operators from the first product to the second."""

    graph: Graph
    var: Any  #: the value so far
    axes: list[Axis]  #: axes of the scores, by letters of `SCORES`
    scale: float = 1.0
    masks: list[Mask] = field(default_factory=list)
    causal: bool = False
    zero_rows: bool = False
    zeroed: Any = None  #: a condition on which rows of the answer are zero
    nodes: list[Node] = field(default_factory=list)
    softmax: Node | None = None
    last: Node | None = None  #: the second product
    obstacle: str = ""  #: reason why it is not made one function

    def __post_init__(self) -> None:
        while self.softmax is None:
            user = self.graph.sole_user(self.var)
            if user is None:
                self._reads_twice()
                return
            if not self._takes(user):
                return
            self._step(user)
        while not self.obstacle and self.last is None:
            self._weights()

    def _reads_twice(self) -> None:
        users = self.graph.users.get(self.var, [])
        self.softmax = next((user for user in users if user.op == "nn.softmax"), None)
        self.obstacle = "its scores are read more than once"

    def _step(self, *nodes: Node) -> None:
        self.nodes += nodes
        self.var = nodes[-1].var

    def _takes(self, node: Node) -> bool:
        """Take an operator between the product and softmax, or that; False for others."""
        factor = factor_of(node)
        if node.op == "nn.softmax":
            self.softmax = node
            if int(node.attrs.axis) not in (-1, len(self.axes) - 1):
                self.obstacle = "its softmax is not along the last axis"
        elif factor is not None:
            self.scale *= factor
            if self.masks:
                self.obstacle = "its scores are scaled behind their mask"
        elif node.op == "add" and extents(node.var) == extents(self.var):
            self._mask(node.args[1] if node.args[0].same_as(self.var) else node.args[0])
        elif node.op == "where" and extents(node.var) == extents(self.var):
            return self._hides(node)
        else:
            return self._moves(node)
        return True

    def _hides(self, node: Node) -> bool:
        """Take a choice between scores and a number so low that a score plus it is the same."""
        condition, *choices = node.args
        place = next((at for at, each in enumerate(choices) if each.same_as(self.var)), None)
        number = None if place is None else constant_of(choices[1 - place])
        if number is None or number.size != 1 or number.reshape(-1)[0] > _HIDDEN:
            return False
        fill = float(number.reshape(-1)[0])
        self._mask(condition, (0.0, fill) if place == 0 else (fill, 0.0))
        return True

    def _moves(self, node: Node) -> bool:
        """Take a reshape that leaves the keys as they are, or a cast to the same type."""
        if node.op == "astype":
            return bool(node.var.ty.dtype == self.var.ty.dtype)
        axes = moved(node, self.axes) if node.op in RESHAPES else None
        if axes is None or axes[-1] != self.axes[-1]:
            return False
        self.axes = axes
        return True

    def _mask(self, operand: Any, values: tuple[float, float] | None = None) -> None:
        sizes, numbers = extents(operand), constant_of(operand)
        if numbers is not None and values is None and not np.any(numbers):
            return
        if numbers is not None and self._is_causal(numbers, values):
            self.causal = True
            return
        if sizes is None or str(operand.ty.dtype) != ("float32" if values is None else "bool"):
            self.obstacle = "what is added to its scores is of an unknown shape, or not fp32"
            return
        own = zip(self.axes[len(self.axes) - len(sizes) :], sizes, strict=True)
        parts = merged([part for axis, size in own if size > 1 for part in axis])
        every = merged([part for axis in self.axes for part in axis]) or []
        letters = "".join(part.letter for part in parts or ())
        if parts is None or not set(parts) <= set(every) or not set(letters) <= set(SCORES):
            self.obstacle = "what is added to its scores is of some heads or rows"
        elif [part for part in every if part in parts] != parts or "K" not in letters:
            self.obstacle = "what is added to its scores has other axes than these"
        self.masks.append(Mask(operand, letters, values))

    def _is_causal(self, numbers: Any, values: tuple[float, float] | None) -> bool:
        """Whether a constant mask hides what is behind each query's place, and nothing else."""
        added = numbers if values is None else np.where(numbers, *values)
        shape = np.shape(added)
        keys = shape[-1] if shape else 0
        own = [axis_of("Q", keys), axis_of("K", keys)]
        if shape[-2:] != (keys, keys) or np.size(added) != keys * keys or self.axes[-2:] != own:
            return False
        seen = np.tri(keys, dtype=bool)
        added = added.reshape(keys, keys)
        return bool(not added[seen].any() and np.all(added[~seen] <= _HIDDEN))

    def _weights(self) -> None:
        """Take an operator behind softmax."""
        user, users = self.graph.sole_user(self.var), self.graph.users.get(self.var, [])
        where = _zeroes_nan(users, self.var, self.graph)
        if where is not None:
            self.zero_rows = True
            self._step(*(each for each in users if each is not where), where)
        elif user is None:
            self.obstacle = "its weights are read more than once"
        elif user.op == "where" and user.args[2].same_as(self.var):
            self._replaced(user)
        elif user.op == "matmul" and user.args[0].same_as(self.var):
            self.last = user
            self._step(user)
        elif self._moves(user):
            self._step(user)
        else:
            self.obstacle = f"{user.op or 'another operator'} follows its softmax"

    def _replaced(self, where: Node) -> None:
        """Take a choice between the weights and zeros: of whole rows, it is one of the answer."""
        condition, zero, _ = where.args
        sizes, values = extents(condition), constant_of(condition)
        self._step(where)
        if values is not None and not values.any():
            return
        of_rows = sizes and sizes[-1] == 1 and len(sizes) <= len(self.axes)
        if not of_rows or not _is_zero(zero) or self.zeroed is not None:
            self.obstacle = "some of its weights are replaced"
        self.zeroed = condition


def factor_of(node: Node) -> float | None:
    """The number by which an operator multiplies its only variable; None for others."""
    if node.op not in ("multiply", "divide"):
        return None
    source, values = scaled(node), [constant_of(arg) for arg in node.args]
    number = values[1] if values[0] is None else values[0]
    if source is None or number is None or number.size != 1:
        return None
    if extents(source) != extents(node.var) or (node.op == "divide" and values[0] is not None):
        return None
    value = float(number.reshape(()))
    if node.op == "divide":
        value = 1.0 / value if value else math.inf
    return value if math.isfinite(value) else None


def scaled(node: Node) -> Any:
    """The operand that is no constant, None if there are two or none."""
    variables = [arg for arg in node.args if constant_of(arg) is None]
    return variables[0] if len(variables) == 1 else None


def _zeroes_nan(users: Sequence[Node], var: Any, graph: Graph) -> Node | None:
    """The operator that makes zeros of a variable's values that are no numbers, if that and the
    test for them are all that reads it."""
    tests = [user for user in users if user.op == "isnan"]
    others = [user for user in users if user.op == "where"]
    if len(tests) != 1 or len(others) != 1 or len(users) > len(tests + others):
        return None
    condition, zero, value = others[0].args
    if not _is_zero(zero) or graph.is_result(var):
        return None
    own = condition.same_as(tests[0].var) and graph.sole_user(tests[0].var) is not None
    return others[0] if own and value.same_as(var) else None


def _is_zero(leaf: Any) -> bool:
    values = constant_of(leaf)
    return values is not None and values.size == 1 and not values.any()
