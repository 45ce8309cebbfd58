"""Decides which values of a model may be stored in bfloat16. Imports TVM.

Factors of convolutions and products may, and what these hand to each other, residuals of their
epilogues included; never a value computed from whole numbers alone, an argument of Sin or Cos, a
part of the sums of a recurrent layer's steps, or a tensor that is only added to their answers, as a
mask is. A bfloat16 has 8 bits: of a position
above 256 it is another position, and of the least number of fp32 the infinite one.

Of a quantised model this is so of what is computed without bytes, but for values that are rounded
to bytes next, which would lose half a step, and for activations of 16 bits. Bytes less a zero
point are bfloat16, and sums of their products are as exact as in fp32 (`whole_sums.py`).
"""

from __future__ import annotations

import enum
from collections.abc import Iterable, Set
from dataclasses import replace
from typing import Any

import numpy as np

from tuna.configs import ConvConfig, GemmConfig
from tuna.configs.task import CASTS
from tuna.configs.values import DataType
from tuna.libraries.tvm.kernels.packing import fit_transformed
from tuna_models.compiler import recurrent_calls
from tuna_models.compiler.graph import RESHAPES, Graph, Node, constant_of, extents, variables
from tuna_models.compiler.groups import VALUES, FusionGroup
from tuna_models.compiler.integers import Integers

#: Operators that move values as they are.
MOVING = {*RESHAPES, "permute_dims", "split", "concat", "strided_slice"}
#: Operators whose answer is an argument of Sin or Cos to the digit only if their inputs are; the
#: empty name is a part of a tuple.
_LINEAR = {*MOVING, "", "add", "subtract", "multiply", "divide", "negative", "astype", "where"}
_PERIODIC = {"sin", "cos"}
#: Operators that read values of their first argument at places.
_LOOKUPS = {"take", "gather_elements", "gather_nd"}
#: Largest of the whole numbers that all are bfloat16.
_EXACT = 256
_TO_FP32 = "to_fp32"


class _Whole(enum.IntEnum):
    """Numbers that a value is computed from, with constants and nothing else."""

    NONE = 0
    BYTES = 1  #: pixels of an image
    WIDER = 2


class Bf16Storage:
    """The decisions on one graph."""

    def __init__(
        self,
        graph: Graph,
        integers: Integers,
        taken: Set[Any] = frozenset(),
        exact: Set[Any] = frozenset(),
    ) -> None:
        """`taken` are the variables of operators on bytes, `exact` those of sums of whole
        numbers."""
        self._graph, self._integers, self._exact = graph, integers, exact
        self._others = taken | exact
        self._whole = {param: _of_type(param) for param in graph.params}
        self._summed = set[Any]()  #: answers of convolutions and products, and what is made of them
        for node in graph.nodes:
            sources = variables(node.value)
            self._whole[node.var] = whole = self._whole_of(node, sources)
            is_summed = self._sums(node) or not self._summed.isdisjoint(sources)
            if is_summed and not whole and node.var not in integers.bases:
                self._summed.add(node.var)
        self._arguments = set[Any]()  #: values that Sin or Cos is computed from
        self._only_arguments = set[Any]()  #: those that nothing else reads
        for node in reversed(graph.nodes):
            users = graph.users.get(node.var, [])
            if node.op in _PERIODIC or (node.var in self._arguments and node.op in _LINEAR):
                self._arguments.update(variables(node.value))
            if users and not graph.is_result(node.var) and all(map(self._goes_to_sine, users)):
                self._only_arguments.add(node.var)
        #: parts of the inputs in the sums of recurrent steps, to which the state's is added
        self._parts = {recurrent_calls.product_of(node, graph.functions) for node in graph.nodes}
        self._factors = dict[Any, bool]()
        #: answers of groups that are left in fp32, and with these what they read
        self._left, self._precise = set[Any](), set[Any]()
        #: answers of the model, and values of which they are other shapes
        self._results = set(variables(graph.result))
        for node in reversed(graph.nodes):
            if node.var in self._results and node.op in RESHAPES:
                self._results.update(variables(node.value))

    def stores(self, var: Any) -> bool:
        """Whether a variable may be stored in bfloat16."""
        if self._whole[var] or var in self._arguments or var in self._exact | self._parts:
            return False
        if var in self._integers.bases or var in self._integers.wide or self._is_rounded(var):
            return False
        return var in self._summed or self._becomes_factor(var)

    def leave(self, groups: Iterable[FusionGroup]) -> None:
        """Leave these in fp32, and what they read and write where it is there in fp32."""
        for group in groups:
            self._left.add(group.answer)
            self._precise.update((group.answer, *group.operands))

    def leaves(self, answer: Any) -> bool:
        """Whether the group that computes a variable is left in fp32, and with it the recurrent
        steps that read this."""
        return answer in self._left

    def may_round(self, var: Any) -> bool:
        """Whether a variable may be read as bfloat16 where it is there in its own type."""
        return self.stores(var) and var not in self._precise

    def computes(self, group: FusionGroup) -> bool:
        """Whether the factors of a convolution or product may be rounded to bfloat16."""
        if isinstance(group.core, GemmConfig) and group.core.k == 1:
            return False  # a scaling, which bfloat16 makes no faster
        if group.exact:
            return True
        if self._is_of_bytes(group):
            return False  # it is checked as one of whole numbers
        if group.answer in self._only_arguments:
            return False
        allowed = _Whole.BYTES if isinstance(group.core, ConvConfig) else _Whole.NONE
        factors = [group.input, *([] if group.other is None else [group.other])]
        factors += [group.added[VALUES]] if VALUES in group.added else []
        if not self._integers.wide.isdisjoint(factors):
            return False  # 16 bits are more than bfloat16 has
        if any(self._whole_leaf(leaf) > allowed for leaf in factors):
            return False
        return group.weights is None or not _counts(group.weights)

    def in_bf16(self, group: FusionGroup) -> FusionGroup | None:
        """The group with its core in bf16, None where it may not be; an answer of the model, or one
        that may not be stored in bfloat16, is written in fp32."""
        if not self.computes(group):
            return None
        epilogue = list(group.epilogue)
        wide = group.answer in self._results or not self.stores(group.answer)
        if wide and not set(epilogue[-1:]) & set(CASTS):
            epilogue.append(_TO_FP32)
        core = replace(group.core, data_type=DataType.BF16)
        exact = group.exact or (isinstance(core, ConvConfig) and not fit_transformed(group.weights))
        return replace(group, core=core, epilogue=epilogue, exact=exact)

    def _whole_leaf(self, leaf: Any) -> _Whole:
        values = constant_of(leaf)
        if values is None:
            return self._whole[leaf]
        return _Whole.WIDER if _counts(values) else _Whole.NONE

    def _whole_of(self, node: Node, sources: list[Any]) -> _Whole:
        own = _of_type(node.var)
        if own:
            return own
        if node.op in _LOOKUPS:
            sources = variables(node.args[0])  # a table's values, wherever they are read
            return self._of_all(sources) if sources else _Whole.NONE
        if _sums(node) and any(constant_of(arg) is not None for arg in node.args):
            return _Whole.NONE  # of learned weights
        return self._of_all(sources) if sources else _Whole.WIDER

    def _of_all(self, sources: list[Any]) -> _Whole:
        kinds = [self._whole[source] for source in sources]
        return max(kinds) if all(kinds) else _Whole.NONE

    def _sums(self, node: Node) -> bool:
        """Whether it is a convolution or a product of real values."""
        return _sums(node) and node.var not in self._others

    def _is_rounded(self, var: Any) -> bool:
        """Whether an operator rounds the variable, or what it is in steps, to bytes."""
        users = [user.var for user in self._graph.users.get(var, ())]
        roundings, wide = self._integers.roundings, self._integers.wide
        return any(each in roundings or each in wide for each in (var, *users))

    def _is_of_bytes(self, group: FusionGroup) -> bool:
        """Whether both factors are real values of bytes."""
        other = group.nodes[0].args[1] if group.other is None else group.other
        is_other = other in self._integers.bases or other in self._graph.whole
        return group.input in self._integers.bases and is_other

    def _goes_to_sine(self, user: Node) -> bool:
        linear = user.op in _LINEAR and user.var in self._only_arguments
        return user.op in _PERIODIC or linear

    def _becomes_factor(self, var: Any) -> bool:
        """Whether the variable, or what is computed from it alone, is a factor of a convolution or
        product: data, not a mask, which is added to other values."""
        if var not in self._factors:
            reached = {var}
            self._factors[var] = any(self._reaches(node, reached) for node in self._graph.nodes)
        return self._factors[var]

    def _reaches(self, node: Node, reached: set[Any]) -> bool:
        """Whether a node sums products of a variable that is `reached`; adds what it computes from
        those alone, or moves."""
        sources = variables(node.value)
        if reached.isdisjoint(sources):
            return False
        if self._sums(node):
            return True
        if node.var in self._integers.bases or node.var in self._others:
            return False
        if node.op in MOVING or reached.issuperset(sources):
            reached.add(node.var)
        return False


def _sums(node: Node) -> bool:
    """Whether it is a convolution or a product, of more than one value for each of its answer's."""
    if node.op == "matmul":
        shape = extents(node.args[0])
        return shape is None or shape[-1] != 1
    return node.op.startswith("nn.conv")


def _of_type(var: Any) -> _Whole:
    kind = str(getattr(var.ty, "dtype", "float32"))
    if "float" in kind:
        return _Whole.NONE
    return _Whole.BYTES if kind in ("uint8", "int8") else _Whole.WIDER


def _counts(values: Any) -> bool:
    """Whether an array has nothing but whole numbers, of which some are no bfloat16."""
    if not values.size or np.abs(values).max() <= _EXACT:
        return False
    return bool(np.all(values == np.round(values)))
