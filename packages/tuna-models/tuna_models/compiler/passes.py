"""The passes from an imported module to what is known of it, one below the other. Imports TVM.

A model is analysed once for a target and a precision. Variants with other kernels, and the forms
that are checked, are emissions of the same analysis (`build.emit`).
"""

from __future__ import annotations

from collections.abc import Callable, Collection
from dataclasses import dataclass, field
from functools import cached_property, partial
from typing import Any

import tvm

from tuna.libraries.tvm import problems
from tuna.libraries.tvm.kernels import machine
from tuna_models.compiler import (
    attention,
    graph,
    groups,
    indices,
    integer_finder,
    rules,
    segments,
    slopes,
    whole_sums,
)
from tuna_models.compiler.bf16_storage import Bf16Storage
from tuna_models.compiler.graph import Graph
from tuna_models.compiler.groups import FusionGroup
from tuna_models.compiler.integer_groups import IntegerGroups
from tuna_models.compiler.segments import Cut
from tuna_models.manifest import Precision


@dataclass
class Analysis:
    """An imported module, and what the passes have found out of it."""

    module: tvm.IRModule
    target: Any
    precision: Precision
    tuned: bool  #: False: nothing becomes a kernel of ours
    in_fp32: frozenset[int] = frozenset()  #: places of groups that bf16 leaves in fp32
    graph: Graph = field(default_factory=lambda: Graph([], [], None))
    cuts: list[Cut] = field(default_factory=list)  #: quantised tensors where the model is cut
    #: convolutions, products and sums that are computed with bytes
    integers: IntegerGroups = field(default_factory=IntegerGroups)
    exact: set[Any] = field(default_factory=set)  #: variables of sums of whole numbers in fp32
    storage: Bf16Storage | None = None  #: what is stored in bf16; None: nothing
    groups: list[FusionGroup] = field(default_factory=list)  #: other convolutions and products
    #: reasons why convolutions and products are no groups, by their labels
    refused: dict[str, str] = field(default_factory=dict)
    written: Any = None  #: the last `build.Written` of it as it is shipped, if that is kept
    #: functions on tensors' forms, and those of kernels, which all modules written of it share
    functions: dict[Any, Any] = field(default_factory=dict)

    @property
    def block(self) -> int:
        """Number of channels in a block."""
        return machine.from_target(self.target).floats

    def place(self, group: FusionGroup) -> int:
        """The number of convolutions and products before the group's first one, in the model."""
        return self._places[next(node.var for node in group.nodes if node.var in self._places)]

    @cached_property
    def _places(self) -> dict[Any, int]:
        cores = (node.var for node in self.graph.nodes if node.op in groups.CORES)
        return {var: place for place, var in enumerate(cores)}

    @cached_property
    def reasons(self) -> dict[str, str]:
        """Reasons why operators have no kernel, or are no part of another's, by their labels."""
        reasons = self.refused | {node.label: reason for node, reason in self.integers.refused}
        for group in self.groups:
            reasons |= group.reasons
            if refusal := problems.refusal(group.task, self.target):
                core = next(node for node in group.nodes if node.op in groups.CORES)
                reasons[core.label] = refusal
        return reasons


def analyse(
    module: tvm.IRModule,
    target: Any,
    *,
    precision: Precision = Precision.FP32,
    tuned: bool = True,
    in_fp32: Collection[int] = (),
) -> Analysis:
    """Run the passes on an imported module.

    With the `precision` bf16 convolutions and products that have no bytes are in bf16, but for
    those whose place (`Analysis.place`) is among `in_fp32`.
    """
    analysis = Analysis(module, target, precision, tuned, frozenset(in_fp32))
    for each in PASSES:
        made = each.run(analysis)
        for name, value in zip(each.makes, made if len(each.makes) > 1 else [made], strict=True):
            setattr(analysis, name, value)
    if analysis.storage is not None:
        every = analysis.groups
        analysis.storage.leave(one for one in every if analysis.place(one) in analysis.in_fp32)
    return analysis


def _bytes(analysis: Analysis) -> IntegerGroups:
    if not analysis.tuned:
        return IntegerGroups()
    refusal = partial(problems.refusal, target=analysis.target)
    return integer_finder.find(analysis.graph, analysis.block, refusal)


def _types(analysis: Analysis) -> Bf16Storage | None:
    if analysis.precision is not Precision.BF16 or not analysis.tuned:
        return None
    whole = analysis.integers
    return Bf16Storage(analysis.graph, whole.integers, whole.taken, analysis.exact)


def _cores(analysis: Analysis) -> tuple[list[FusionGroup], dict[str, str]]:
    taken, storage = analysis.integers.taken, analysis.storage
    adds = None if storage is None else storage.stores
    return groups.find(analysis.graph, analysis.block, taken, analysis.exact, adds)


def _attention(analysis: Analysis) -> list[FusionGroup]:
    if not analysis.tuned:
        return analysis.groups
    taken = analysis.integers.taken | {cut.var for cut in analysis.cuts}
    return attention.with_attention(analysis.groups, analysis.graph, analysis.target, taken)


@dataclass(frozen=True)
class Pass:
    """A named step of the analysis."""

    name: str
    makes: tuple[str, ...]  #: fields of the analysis that it sets
    run: Callable[[Analysis], Any]  #: returns the value, or a tuple of one for each field


PASSES = (
    Pass("fold", ("graph",), lambda a: graph.read(a.module)),
    Pass("slopes", ("graph",), lambda a: slopes.restored(a.graph)),
    Pass("cuts", ("graph", "cuts"), lambda a: segments.split(a.graph, a.module)),
    Pass("indices", ("graph",), lambda a: indices.checked(a.graph)),
    Pass("bytes", ("integers",), _bytes),
    Pass("sums", ("graph", "exact"), lambda a: whole_sums.written_out(a.graph, a.integers)),
    Pass("types", ("storage",), _types),
    Pass("cores", ("groups", "refused"), _cores),
    Pass("attention", ("groups",), _attention),
    Pass("epilogues", ("groups",), lambda a: rules.with_epilogues(a.groups, a.graph, a.integers)),
)
