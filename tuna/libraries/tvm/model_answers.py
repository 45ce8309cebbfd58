"""The right answers of a whole model, in a file, and the rules by which a built one is compared.

Floating-point values are compared by their largest error relative to the largest magnitude of the
tensor; infinities and NaN have to be in the same places. Whole numbers and truth values are equal,
or lie between bounds that the file has, which are apart only where the real value before a rounding
or a comparison lies next to the edge; indices may be others where the file says that they are as
good. Type and shape have to be the same.

A quantised model is compared segment by segment (`compiler/segments.py` of tuna-models): each
computes its quantised tensors from those of the reference.
"""

from __future__ import annotations

import functools
import json
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import numpy as np

from tuna.configs.model import SMALL, TOLERANCE
from tuna.libraries.reference import Problem

#: Maximum distance of what a function of a built model returns for a quantised tensor from the
#: whole numbers that it stands for
_OFF = 1e-2


@dataclass(frozen=True)
class RightOutput:
    """A tensor as it should be."""

    values: Any
    name: str = ""
    low: Any = None  #: smallest whole numbers that are right as well; None: not whole numbers
    high: Any = None  #: largest whole numbers that are right as well
    allowed: Any = None  #: true where an index of the last axis is right as well; None: not indices

    def compare(self, given: Any, tolerance: float, *, partial: bool = False) -> Difference:
        """Compare with a tensor; `tolerance` is of floating-point values. With `partial` anything
        is right where the right value is NaN."""
        right = np.asarray(self.values)
        if given.shape != right.shape or given.dtype != right.dtype:
            kinds = (f"{array.dtype} of shape {array.shape}" for array in (given, right))
            return Difference(float("inf"), why="is {}, and should be {}".format(*kinds))
        if right.dtype.kind in "fc":
            defined = ~np.isnan(right) if partial else ...
            error = distance(given[defined], right[defined])
            why = f"differs by {error:.2g} of its largest value, more than {tolerance:.2g}"
            if error == float("inf"):
                why = "has infinities or NaN in other places than it should"
            return Difference(error, why="" if error <= tolerance else why)
        wrong = (given < (right if self.low is None else self.low)) | (
            given > (right if self.high is None else self.high)
        )
        if self.allowed is not None:
            inside = np.clip(given, 0, self.allowed.shape[-1] - 1).astype(np.int64)
            chosen = np.take_along_axis(self.allowed, inside[..., None], -1)[..., 0]
            wrong = (given != right) & ~(chosen & (inside == given))
        others = int(np.sum(given != right))
        if not np.any(wrong):
            return Difference(0.0, others)
        at = np.unravel_index(int(np.argmax(wrong)), wrong.shape)
        place = ", ".join(map(str, map(int, at)))
        return Difference(
            float("inf"),
            others,
            f"has {int(np.sum(wrong))} wrong values of {wrong.size}, the first at [{place}]:"
            f" {given[at]} in the place of {right[at]}",
        )


@dataclass(frozen=True)
class Difference:
    """The difference of a tensor from what it should be."""

    error: float  #: error relative to the largest magnitude; infinite for another fault
    others: int = 0  #: number of whole numbers that differ, right or not
    why: str = ""  #: description of the fault; empty: none


def distance(found: Any, right: Any) -> float:
    """The largest difference of numbers relative to the largest magnitude in `right`; infinite for
    another shape, and where infinities and NaN are in other places."""
    found, right = (np.asarray(array).astype(np.float64) for array in (found, right))
    finite = np.isfinite(right)
    if found.shape != right.shape or not np.array_equal(
        np.where(finite, 0.0, right), np.where(np.isfinite(found), 0.0, found), equal_nan=True
    ):
        return float("inf")
    scale = float(np.max(np.abs(right[finite]), initial=0.0)) + SMALL
    return float(np.max(np.abs(found[finite] - right[finite]), initial=0.0)) / scale


@dataclass(frozen=True)
class Case:
    """Inputs, and the right answers to them."""

    inputs: Sequence[Any]
    outputs: Sequence[RightOutput]
    cuts: Sequence[RightOutput] = ()  #: quantised tensors, by the names in the model's file
    title: str = ""  #: title of the inputs, such as `silent`
    #: maximum error of floating-point outputs; None: that of `Answers`
    tolerance: float | None = None
    partial: bool = False  #: True: NaN stands for values that are undefined


@dataclass(frozen=True)
class Answers:
    """Inputs of a model with the right answers."""

    cases: Sequence[Case]  #: inputs with their right answers; the model is timed on the first
    tolerance: float = TOLERANCE  #: maximum error of floating-point outputs
    #: call of built libraries, of which the first one's answer is right: see `built_models`; None:
    #: the answers are here
    call: Mapping[str, Any] | None = None

    def write(self, path: Path) -> None:
        """Write the file."""
        arrays, cases = dict[str, Any](), []
        for number, case in enumerate(self.cases):
            tensors = {"out": case.outputs, "cut": case.cuts}
            for place, array in enumerate(case.inputs):
                arrays[f"{number}_in_{place}"] = np.asarray(array)
            for kind, answers in tensors.items():
                for place, answer in enumerate(answers):
                    for part in _PARTS:
                        array = getattr(answer, part)
                        if array is not None:
                            key = f"{number}_{kind}_{place}_{part}"
                            # bounds are the values almost everywhere: zeros take no room
                            differs = array ^ answer.values if part in _BOUNDS else array
                            arrays[key] = np.asarray(differs)
            names = {kind: [answer.name for answer in of] for kind, of in tensors.items()}
            facts = {
                "title": case.title,
                "tolerance": case.tolerance,
                "partial": case.partial,
            }
            cases.append({"inputs": len(case.inputs), **facts, **names})
        called = {} if self.call is None else {"call": self.call}
        text = json.dumps({"cases": cases, "tolerance": self.tolerance, **called})
        with open(path, "wb") as file:
            np.savez_compressed(file, facts=np.asarray(text), **arrays)

    @classmethod
    def read(cls, path: Path) -> Answers:
        """Read the file."""
        with np.load(path, allow_pickle=False) as file:
            arrays = {name: file[name] for name in file.files}
        facts = json.loads(str(arrays["facts"]))

        def answers(number: int, kind: str, names: Sequence[str]) -> list[RightOutput]:
            outputs = []
            for place, name in enumerate(names):
                parts: dict[str, Any] = {
                    part: arrays.get(f"{number}_{kind}_{place}_{part}") for part in _PARTS
                }
                for part in _BOUNDS:
                    if parts[part] is not None:
                        parts[part] = parts[part] ^ parts["values"]
                outputs.append(RightOutput(name=name, **parts))
            return outputs

        cases = [
            Case(
                [arrays[f"{number}_in_{place}"] for place in range(case["inputs"])],
                answers(number, "out", case["out"]),
                answers(number, "cut", case["cut"]),
                case["title"],
                case["tolerance"],
                case["partial"],
            )
            for number, case in enumerate(facts["cases"])
        ]
        return cls(cases, facts["tolerance"], facts.get("call"))


_BOUNDS = ("low", "high")
_PARTS = ("values", *_BOUNDS, "allowed")


@dataclass(frozen=True)
class Quantised:
    """The form of a quantised tensor in the program's fp32 functions: whole numbers, or real
    values (whole number - zero) * scale."""

    name: str
    zero: Any = None
    scale: Any = None

    def to_floats(self, whole: Any) -> Any:
        """The form of the program's functions."""
        if self.scale is None:
            return np.asarray(whole, np.float32)
        centered = np.asarray(whole, np.float32) - np.asarray(self.zero, np.float32)
        return centered * np.asarray(self.scale, np.float32)

    def to_whole(self, floats: Any, kind: Any) -> Any:
        """Whole numbers of a type; fp32 where the values are none."""
        exact = floats.astype(np.float64)
        if self.scale is not None:
            exact = exact / np.float32(self.scale) + np.float32(self.zero)
        found, limits = np.rint(exact), np.iinfo(kind)
        if not np.all((abs(exact - found) < _OFF) & (found >= limits.min) & (found <= limits.max)):
            return floats
        return found.astype(kind)


@dataclass(frozen=True)
class Run:
    """Outputs of the program's functions for the inputs of a case."""

    outputs: Sequence[Any]  #: outputs of the model, or of a quantised model's segments
    #: results of a quantised model's segments on the reference's values, by name
    quantised: Mapping[str, Any] = field(default_factory=dict)
    #: true if `main` returns what the segments compute, each from the results of those before it
    composed: bool = True


@dataclass(frozen=True)
class ModelProblem(Problem):
    """Inputs of a model, those of the first case, and the right answers to those of all cases."""

    answers: Answers

    def error(self, answer: Sequence[Run]) -> float:
        """The largest error of a floating-point output, of cases but the first only if it is too
        large; infinite where another rule is broken."""
        found = self._compared(answer)
        error = max((each.error for first, _, each in found if first or each.why), default=0.0)
        return min(error, self.tolerance) if self.answers.call is not None else error

    def report(self, answer: Sequence[Run]) -> str:
        """Return what is wrong, by the tensor's name; else how many whole numbers differ where they
        may, of how many."""
        compared, others = self._compared(answer), 0
        for _, title, found in compared:
            if found.why:
                return f"{title} {found.why}"
            others += found.others
        size = sum(
            array.size
            for run in answer
            for array in (*run.outputs, *run.quantised.values())
            if array.dtype.kind not in "fc"
        )
        return f"{others} of {size} whole numbers differ, next to a tie" if size else ""

    def _compared(self, answer: Sequence[Run]) -> list[tuple[bool, str, Difference]]:
        """Whether it is of the first case, a title, and the difference of each tensor; quantised
        ones before outputs."""
        diffs, cases = [], self.answers.cases
        if self.answers.call is not None:
            first_run, *answer = answer
            arrays = enumerate(first_run.outputs)
            outputs = [RightOutput(array, str(place)) for place, array in arrays]
            cases = [replace(cases[0], outputs=outputs)] * len(answer)
        for case, run in zip(cases, answer, strict=True):
            of, first = (
                f" on {case.title} inputs" if case.title else "",
                case is cases[0],
            )
            tolerance = self.answers.tolerance if case.tolerance is None else case.tolerance
            cuts = {right.name: right for right in case.cuts}
            pairs = [
                ("quantised tensor", cuts[name], run.quantised[name]) for name in run.quantised
            ]
            if len(run.outputs) != len(case.outputs):
                why = f"returns {len(run.outputs)} outputs and should return {len(case.outputs)}"
                diffs.append((first, "the model", Difference(float("inf"), why=why)))
            pairs += [("output", *pair) for pair in zip(case.outputs, run.outputs, strict=False)]
            for kind, right, array in pairs:
                difference = right.compare(array, tolerance, partial=case.partial)
                diffs.append((first, f"the {kind} {right.name}{of}", difference))
            if not run.composed:
                why = "is not what its segments compute, one after the other"
                diffs.append((first, f"the model's answer{of}", Difference(float("inf"), why=why)))
        return diffs


@functools.lru_cache(maxsize=1)
def problem(path: str) -> ModelProblem:
    """The problem in a file of `Answers.write`."""
    answers = Answers.read(Path(path))
    inputs = tuple(answers.cases[0].inputs)
    # a library that differs from the first one is timed all the same
    tolerance = answers.tolerance if answers.call is None else sys.float_info.max
    return ModelProblem(inputs, np.zeros(0), "float64", tolerance, answers)
