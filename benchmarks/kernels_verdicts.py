"""Limits of the figures of `scripts/bench kernels`, each with a line of output."""

from __future__ import annotations

import statistics
import sys
from collections.abc import Iterable
from dataclasses import dataclass

from benchmarks.contest import Contestant
from benchmarks.harness import Outcome
from tuna.configs.values import DataType

#: Most time that a native kernel may take, as a share of oneDNN's best implementation and layout.
NATIVE_LIMITS = {
    "3x3_64@56": 0.36,
    "3x3_128@28": 0.34,
    "3x3_256@14": 0.45,
    "3x3_512@7": 0.85,
    "depthwise_192@28": 1.1,
}
_NATIVE_OTHER, _NATIVE_MEAN = 1.05, 0.72
_DIRECT_EACH, _DIRECT_MEAN = 1.08, 1.00
_LAYER_EACH, _LAYER_MEAN = 1.00, 0.65
#: The same on two cores.
_TWO_CORES_LIMITS = {
    "3x3_64@56": 0.40,
    "3x3_128@28": 0.45,
    "3x3_256@14": 0.60,
    "3x3_512@7": 0.95,
}
_TWO_CORES_OTHER = 1.02
#: Of kernels of bf16 and int8: least share of their own peak of dense layers whose channels fill
#: blocks, and most time against oneDNN, on one core.
_WORDS_SHARE, _WORDS_MEAN = 0.88, 0.97
_DENSE = ("1x1", "3x3")
_TUNE_TIR = 0.5
#: Layers with a best kernel at this share of the peak, by the operations of the direct sum.
_AT_PEAK, _PEAK_SHARE = 7, 0.95
#: Most time of the best of the first candidates over the best of all; one layer may take more.
_FIRST = 1.10


@dataclass
class LayerResult:
    """Measurements of a layer in a mode."""

    name: str
    mode: str
    best: Contestant
    direct: Contestant | None
    first: Contestant  #: the best of the first candidates
    vendor: Contestant | None
    tune_tir: Contestant | None
    wall_s: float  #: of tuning
    tune_tir_s: float

    @property
    def key(self) -> str:
        """Name and mode."""
        return f"{self.name} {self.mode}"


def verdicts(
    outcome: Outcome,
    results: list[LayerResult],
    cores: int,
    *,
    complete: bool,
    data_type: DataType = DataType.FP32,
) -> None:
    """Add ratios and limits to `outcome` and print them; means only if all layers are there."""
    if data_type is DataType.FP32:
        _verdicts(outcome, results, cores, complete)
    else:
        _verdicts_of_words(outcome, results, complete and cores == 1)
    _say(outcome)


def _verdicts_of_words(outcome: Outcome, results: list[LayerResult], judged: bool) -> None:
    for found in results:
        if found.vendor:
            outcome.ratios[f"{found.key} against oneDNN"] = found.best.against(found.vendor)
        if judged and found.name.startswith(_DENSE):
            outcome.budget[f"{found.key} share of peak"] = _WORDS_SHARE
    ratios = _named(outcome, results, "native", "")
    _mean(outcome, "native against oneDNN", ratios, _WORDS_MEAN, judged)


def _verdicts(outcome: Outcome, results: list[LayerResult], cores: int, complete: bool) -> None:
    for found in results:
        if found.vendor:
            outcome.ratios[f"{found.key} against oneDNN"] = found.best.against(found.vendor)
            outcome.limits[f"{found.key} against oneDNN"] = _limit(found, cores)
        if found.vendor and found.direct and found.mode == "native" and cores == 1:
            outcome.ratios[f"{found.name} direct against oneDNN"] = found.direct.against(
                found.vendor
            )
            outcome.limits[f"{found.name} direct against oneDNN"] = _DIRECT_EACH
        if found.tune_tir:
            for name, ratio in (
                (f"{found.key} against tune_tir", found.best.against(found.tune_tir)),
                (f"{found.key} tuning against tune_tir", found.wall_s / found.tune_tir_s),
            ):
                outcome.ratios[name], outcome.limits[name] = ratio, _TUNE_TIR
    _means(outcome, results, cores, complete)
    if complete and cores == 1:
        _counts(outcome, results)


def _limit(found: LayerResult, cores: int) -> float:
    if cores > 1:
        limits = _TWO_CORES_LIMITS if found.mode == "native" else {}
        return limits.get(found.name, _TWO_CORES_OTHER)
    return NATIVE_LIMITS.get(found.name, _NATIVE_OTHER) if found.mode == "native" else _LAYER_EACH


def _means(outcome: Outcome, results: list[LayerResult], cores: int, complete: bool) -> None:
    for mode, most in (("native", _NATIVE_MEAN), ("layer", _LAYER_MEAN)):
        _mean(
            outcome,
            f"{mode} against oneDNN",
            _named(outcome, results, mode, ""),
            most,
            complete and cores == 1,
        )
    direct = _named(outcome, results, "native", " direct") if cores == 1 else []
    _mean(outcome, "direct against oneDNN", direct, _DIRECT_MEAN, complete)


def _named(outcome: Outcome, results: list[LayerResult], mode: str, what: str) -> list[float]:
    names = (
        f"{found.name if what else found.key}{what} against oneDNN"
        for found in results
        if found.mode == mode
    )
    return [outcome.ratios[name] for name in names if name in outcome.ratios]


def _mean(outcome: Outcome, name: str, values: Iterable[float], most: float, judged: bool) -> None:
    values = list(values)
    if values:
        outcome.ratios[f"{name}, geometric mean"] = statistics.geometric_mean(values)
        if judged:
            outcome.limits[f"{name}, geometric mean"] = most


def _counts(outcome: Outcome, results: list[LayerResult]) -> None:
    for mode in {found.mode for found in results}:
        here = [found for found in results if found.mode == mode]
        near = f"{mode}: layers whose first candidates are near the best"
        outcome.figures[near] = sum(found.first.against(found.best) <= _FIRST for found in here)
        outcome.budget[near] = len(here) - 1
    native = [found for found in results if found.mode == "native"]
    if native:
        name = f"native: layers at {_PEAK_SHARE:.0%} of the peak"
        outcome.figures[name] = sum(found.best.share >= _PEAK_SHARE for found in native)
        outcome.budget[name] = _AT_PEAK


def _say(outcome: Outcome) -> None:
    figures = outcome.figures | outcome.ratios
    for name, least in outcome.budget.items():
        verdict = "met" if figures[name] >= least else "MISSED"
        print(f"{verdict:6} {figures[name]:6.3g} of at least {least:<5g} {name}", file=sys.stderr)
    for name, most in outcome.limits.items():
        verdict = "met" if figures[name] <= most else "MISSED"
        print(f"{verdict:6} {figures[name]:6.3f} of at most  {most:<5g} {name}", file=sys.stderr)
