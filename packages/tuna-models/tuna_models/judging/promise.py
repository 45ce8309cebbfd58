"""Chooses what a model in bf16 leaves in fp32, so that its error is kept on all inputs of the check
and on natural ones. Imports TVM.

The error of each convolution, product and attention is measured alone: the model runs in fp32 with
its roundings and no others (`compiler/roundings.py`). Errors of several add up as the roots of sums
of squares do, nearly; so the cheapest set is chosen by that, measured as a whole, and chosen again
with what the sum was off by.
"""

from __future__ import annotations

from collections.abc import Collection, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import numpy as np
import tvm

from tuna.libraries.tvm.model_answers import Answers, Case, RightOutput
from tuna.libraries.tvm.whole_models import arrays_of
from tuna_models.compiler import build, choosing
from tuna_models.compiler.build import TaskKernels
from tuna_models.compiler.passes import Analysis
from tuna_models.compiler.program import machine_of
from tuna_models.judging import natural
from tuna_models.manifest import LeftInFp32, Promise

#: Part of the bound that the error as measured here may reach: other inputs of the same kind have
#: other errors, and kernels in bf16 add up in another order
_PART = 0.6
#: Largest error that is told from others; beyond are wrong whole numbers, and infinities
_LARGEST = 1e3
#: Largest number of inputs on which errors are measured one by one at first
_CASES = 3
#: Operations of all runs for that together, and the least number of runs
_OPERATIONS, _MIN_RUNS = 2e13, 60
#: Attempts to choose a set
_ATTEMPTS = 20
#: Least cost of a task, as a part of the model's time
_FREE = 1e-6


class Roundings:
    """A model in fp32 with a flag for all that rounds in bf16, compiled."""

    def __init__(self, analysis: Analysis, target: Any) -> None:
        kernels = TaskKernels(target, {}, winograd=False)
        planned, self.sites = build.emit_roundings(analysis, kernels)
        self.places = [analysis.place(group) for group in self.sites]
        self.operations = sum(task.flops * count for task, count in planned.tasks())
        self._machine = machine_of(planned, target)
        self._flags = [tvm.runtime.tensor(np.full(1, on, np.float32)) for on in (0.0, 1.0)]

    def run(self, inputs: Sequence[Any], rounded: Collection[int]) -> list[Any]:
        """The outputs where the sites of these numbers round."""
        tensors = [tvm.runtime.tensor(np.asarray(array, order="C")) for array in inputs]
        flags = [self._flags[number in rounded] for number in range(len(self.sites))]
        return arrays_of(self._machine["main"](*tensors, *flags))

    def error(self, case: Case, rounded: Collection[int]) -> float:
        """The largest error of an output where these sites round."""
        outputs = self.run(case.inputs, rounded)
        pairs = zip(case.outputs, outputs, strict=True)
        errors = [right.compare(own, 0.0, partial=case.partial).error for right, own in pairs]
        return min(max(errors, default=0.0), _LARGEST)


def with_natural(
    answers: Answers, roundings: Roundings, inputs: Sequence[Any]
) -> tuple[Answers, int]:
    """The cases with natural ones behind the first, whose answers are those in fp32, and their
    number; none where these are not real numbers alone. `inputs` as in a manifest."""
    first, *others = answers.cases
    names = [declared["name"] for declared in inputs]
    cases = []
    for title, arrays in natural.sets(inputs, dict(zip(names, first.inputs, strict=True))):
        given = [arrays[name] for name in names]
        outputs = roundings.run(given, ())
        if all(array.dtype.kind == "f" and np.isfinite(array).all() for array in outputs):
            named = zip(outputs, first.outputs, strict=True)
            right = [RightOutput(array, answer.name) for array, answer in named]
            cases.append(Case(given, right, title=title))
    return replace(answers, cases=[first, *cases, *others]), len(cases)


def choose(
    answers: Answers,
    roundings: Roundings,
    costs: Sequence[float],
    *,
    left: Collection[int] = (),
    built_error: float = 0.0,
) -> Promise:
    """What stays in fp32 so that the answers' bounds are kept.

    `costs` are those of the sites. `left` are places that stay in fp32 in any case, of a model that
    was built so and was off by `built_error`.
    """
    fixed = {number for number, place in enumerate(roundings.places) if place in left}
    search = _Search(answers, roundings, costs, fixed)
    errors = search.errors(search.sites)
    now = max(search.errors(search.sites - fixed)) if fixed else max(errors)
    if built_error and now > 0:
        search.bounds = search.bounds / max(1.0, min(built_error, _LARGEST) / now)
    in_fp32 = search.run(errors, at_least=len(fixed) + bool(built_error))
    chosen = sorted(in_fp32, key=lambda number: -costs[number])
    return Promise(
        max_error=answers.tolerance,
        error=_digits(max(search.errors(search.sites - in_fp32))),
        whole_error=_digits(max(errors)),
        left=tuple(
            LeftInFp32(
                place=roundings.places[number],
                label=roundings.sites[number].task.label,
                cost=_digits(costs[number]),
            )
            for number in chosen
        ),
    )


def costs(roundings: Roundings, analysis: Analysis, target: Any) -> list[float]:
    """The estimated time of each site in fp32 beside that in bf16, as a part of all of theirs."""
    assert analysis.storage is not None
    wide, narrow = list[float](), list[float]()
    for group in roundings.sites:
        in_bf16 = analysis.storage.in_bf16(group)
        assert in_bf16 is not None
        for cycles, task in ((wide, group.task), (narrow, in_bf16.task)):
            cycles.append(min(choosing.estimates(task, target).values(), default=0.0))
    whole = sum(narrow) or 1.0
    return [max((slow - fast) / whole, 0.0) for slow, fast in zip(wide, narrow, strict=True)]


def _digits(value: float) -> float:
    """The value to two digits, which are the same each time."""
    return float(f"{value:.1e}")


@dataclass
class _Search:
    """The search for a cheap set that keeps the bounds."""

    answers: Answers
    roundings: Roundings
    costs: Sequence[float]
    fixed: set[int]  #: sites that stay in fp32
    bounds: Any = field(init=False)  #: largest errors, by case
    sites: set[int] = field(init=False)  #: numbers of all sites
    #: by case, squares of the errors of sites that add up to what was measured of all
    squares: dict[int, Any] = field(default_factory=dict)

    def __post_init__(self) -> None:
        tolerances = [case.tolerance or self.answers.tolerance for case in self.answers.cases]
        self.bounds = _PART * np.array(tolerances)
        self.sites = set(range(len(self.roundings.sites)))

    def errors(self, rounded: Collection[int]) -> Any:
        """The error of each case where these sites round."""
        return np.array([self.roundings.error(case, rounded) for case in self.answers.cases])

    def run(self, errors: Any, at_least: int) -> set[int]:
        """The sites that stay in fp32, more than `at_least` - 1; `errors` are those where all
        round."""
        sites, in_fp32 = self.sites, set(self.fixed)
        errors = self.errors(sites - in_fp32) if in_fp32 else errors
        for _ in range(_ATTEMPTS):
            beyond = [int(at) for at in np.argsort(-errors / self.bounds)]
            beyond = [at for at in beyond if errors[at] > self.bounds[at]]
            if not beyond and len(in_fp32) >= at_least:
                return self._without_unneeded(in_fp32, at_least)
            for at in beyond[:_CASES]:
                if at not in self.squares:
                    self.squares[at] = self._measured(at)
                rounding = self.squares[at][sorted(sites - in_fp32)].sum()
                if rounding > 0:  # what adds up is what was measured, and some more
                    self.squares[at] *= 1.05 * errors[at] ** 2 / rounding
            chosen = self._chosen()
            if chosen <= in_fp32 or len(chosen | in_fp32) < at_least:
                chosen |= {self._worst(sites - in_fp32)}
            in_fp32 = chosen | self.fixed
            if in_fp32 == sites:
                break
            errors = self.errors(sites - in_fp32)
        return self._without_unneeded(sites, at_least)

    def _measured(self, at: int) -> Any:
        """The squares of the errors of the sites on a case, each alone, or of many together."""
        case, count = self.answers.cases[at], len(self.roundings.sites)
        runs = max(_MIN_RUNS, int(_OPERATIONS / max(self.roundings.operations, 1) / _CASES))
        size = -(-count // runs)
        squares = np.zeros(count)
        for first in range(0, count, size):
            numbers = range(first, min(first + size, count))
            squares[numbers] = self.roundings.error(case, numbers) ** 2 / len(numbers)
        return squares

    def _chosen(self) -> set[int]:
        """The cheapest sites, nearly, without which no sum of squares is beyond its bound."""
        shares = np.array([self.squares[at] / self.bounds[at] ** 2 for at in self.squares])
        costs = np.maximum(np.array(self.costs), _FREE)
        sites, in_fp32 = self.sites, set(self.fixed)
        while rounded := sorted(sites - in_fp32):
            beyond = shares[:, rounded].sum(axis=1) > 1
            if not beyond.any():
                break
            gains = shares[beyond][:, rounded].sum(axis=0) / costs[rounded]
            in_fp32.add(rounded[int(np.argmax(gains))])
        for number in sorted(in_fp32 - self.fixed, key=lambda number: -costs[number]):
            rounded = sorted((sites - in_fp32) | {number})
            if (shares[:, rounded].sum(axis=1) <= 1).all():
                in_fp32.remove(number)
        return in_fp32

    def _worst(self, numbers: set[int]) -> int:
        """The one of these sites whose error is the largest."""
        total = sum(self.squares.values()) if self.squares else np.zeros(len(self.costs))
        return max(numbers, key=lambda number: (total[number], -number))

    def _without_unneeded(self, in_fp32: set[int], at_least: int) -> set[int]:
        """The set without those that the bounds do not need, the dearest first."""
        for number in sorted(in_fp32 - self.fixed, key=lambda number: -self.costs[number]):
            if len(in_fp32) == at_least:
                break
            if self._is_kept((self.sites - in_fp32) | {number}):
                in_fp32 = in_fp32 - {number}
        return in_fp32

    def _is_kept(self, rounded: Collection[int]) -> bool:
        """Whether no case is beyond its bound where these sites round; those that were before are
        asked first."""
        first = sorted(range(len(self.bounds)), key=lambda at: at not in self.squares)
        cases = self.answers.cases
        return all(self.roundings.error(cases[at], rounded) <= self.bounds[at] for at in first)
