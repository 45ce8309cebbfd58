"""The passes from an imported module to what is known of it, one below the other. Imports TVM.

A model is analysed once for a target and a precision. Variants with other kernels, and the forms
that are checked, are emissions of the same analysis (`build.emit`).
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import tvm

from tuna.libraries.tvm import problems
from tuna.libraries.tvm.kernels import machine
from tuna_models.compiler import (
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
    graph: Graph = field(default_factory=lambda: Graph([], [], None))
    cuts: list[Cut] = field(default_factory=list)  #: quantised tensors where the model is cut
    #: convolutions, products and sums that are computed with bytes
    integers: IntegerGroups = field(default_factory=IntegerGroups)
    exact: set[Any] = field(default_factory=set)  #: variables of sums of whole numbers in fp32
    storage: Bf16Storage | None = None  #: what is stored in bf16; None: nothing
    groups: list[FusionGroup] = field(default_factory=list)  #: other convolutions and products
    #: reasons why operators have no kernel, or are no part of another's, by their labels
    reasons: dict[str, str] = field(default_factory=dict)
    written: Any = None  #: the last `build.Written` of it as it is shipped, if that is kept

    @property
    def block(self) -> int:
        """Number of channels in a block."""
        return machine.from_target(self.target).floats


def analyse(
    module: tvm.IRModule,
    target: Any,
    *,
    precision: Precision = Precision.FP32,
    tuned: bool = True,
) -> Analysis:
    """Run the passes on an imported module.

    With the `precision` bf16 convolutions and products that have no bytes are in bf16.
    """
    analysis = Analysis(module, target, precision, tuned)
    for each in PASSES:
        each.run(analysis)
    return analysis


def _fold(analysis: Analysis) -> None:
    analysis.graph = graph.read(analysis.module)


def _slopes(analysis: Analysis) -> None:
    analysis.graph = slopes.restored(analysis.graph)


def _cuts(analysis: Analysis) -> None:
    analysis.graph, analysis.cuts = segments.split(analysis.graph, analysis.module)


def _indices(analysis: Analysis) -> None:
    analysis.graph = indices.checked(analysis.graph)


def _bytes(analysis: Analysis) -> None:
    if analysis.tuned:
        refusal = partial(problems.refusal, target=analysis.target)
        analysis.integers = integer_finder.find(analysis.graph, analysis.block, refusal)


def _sums(analysis: Analysis) -> None:
    found = analysis.integers
    analysis.graph, analysis.exact = whole_sums.written_out(
        analysis.graph, found.taken, found.integers
    )


def _types(analysis: Analysis) -> None:
    if analysis.precision is Precision.BF16 and analysis.tuned:
        whole = analysis.integers
        analysis.storage = Bf16Storage(analysis.graph, whole.integers, whole.taken, analysis.exact)


def _cores(analysis: Analysis) -> None:
    taken, storage = analysis.integers.taken, analysis.storage
    adds = None if storage is None else storage.stores
    analysis.groups, reasons = groups.find(
        analysis.graph, analysis.block, taken, analysis.exact, adds
    )
    refused = {node.label: reason for node, reason in analysis.integers.refused}
    analysis.reasons |= reasons | refused


def _epilogues(analysis: Analysis) -> None:
    taken = analysis.integers.taken | {node.var for each in analysis.groups for node in each.nodes}
    for group in analysis.groups:
        if not group.exact:  # an epilogue might fold scales into weights
            rules.extend(group, analysis.graph, taken)
            taken.update(node.var for node in group.nodes)
        analysis.reasons |= group.reasons


def _kernels(analysis: Analysis) -> None:
    for group in analysis.groups:
        if reason := problems.refusal(group.task, analysis.target):
            core = next(node for node in group.nodes if node.op in groups.CORES)
            analysis.reasons[core.label] = reason


@dataclass(frozen=True)
class Pass:
    """A named step of the analysis."""

    name: str
    run: Callable[[Analysis], None]


PASSES = (
    Pass("fold", _fold),
    Pass("slopes", _slopes),
    Pass("cuts", _cuts),
    Pass("indices", _indices),
    Pass("bytes", _bytes),
    Pass("sums", _sums),
    Pass("types", _types),
    Pass("cores", _cores),
    Pass("epilogues", _epilogues),
    Pass("kernels", _kernels),
)
