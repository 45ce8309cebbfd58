"""The verdicts of `scripts/bench kernels`: what is missed is named and fails the benchmark."""

from __future__ import annotations

import pytest

from benchmarks.contest import Contestant
from benchmarks.harness import Outcome
from benchmarks.kernels import LAYERS
from benchmarks.kernels_verdicts import LayerResult, verdicts
from tuna.configs.values import DataType


def contestant(share: float) -> Contestant:
    return Contestant("it", lambda: None, 1.0, shares=[share], gflops=[100 * share])


def result(name: str, share: float = 2.0, first: float = 2.0, direct: float = 0.96) -> LayerResult:
    """Native, beside a vendor at 0.6 of the peak."""
    best, sums = contestant(share), contestant(direct)
    return LayerResult(
        name, "native", best, sums, contestant(first), contestant(0.6), None, 1.0, 0.0
    )


def judged(results: list[LayerResult]) -> tuple[int, Outcome]:
    outcome = Outcome("kernels", {})
    for found in results:
        outcome.figures[f"{found.key} share of peak"] = found.best.share
    verdicts(outcome, results, 1, complete=True, data_type=DataType.FP32)
    return outcome.print(), outcome


def test_kernels_that_are_fast_enough_pass() -> None:
    code, outcome = judged([result(name) for name in LAYERS])
    assert code == 0
    assert outcome.ratios["3x3_64@56 native against oneDNN"] == pytest.approx(0.3)
    assert outcome.figures["native: layers at 95% of the peak"] == len(LAYERS)


@pytest.mark.parametrize(
    ("changes", "count", "line"),
    [
        (
            {"share": 0.5, "first": 0.5},
            1,
            "1.200 of at most  0.36  3x3_64@56 native against oneDNN",
        ),
        ({"direct": 0.5}, 1, "1.200 of at most  1.08  3x3_64@56 direct against oneDNN"),
        (
            {"share": 0.7, "first": 0.7, "direct": 0.7},
            6,
            "5 of at least 7     native: layers at 95% of the peak",
        ),
        (
            {"first": 1.0},
            2,
            "9 of at least 10    native: layers whose first candidates are near the best",
        ),
        (
            {"share": 0.75, "first": 0.75},
            11,
            "0.800 of at most  0.72  native against oneDNN, geometric mean",
        ),
    ],
)
def test_a_missed_figure_fails_and_is_named(
    changes: dict[str, float], count: int, line: str, capsys: pytest.CaptureFixture[str]
) -> None:
    code, _ = judged(
        [result(name, **(changes if index < count else {})) for index, name in enumerate(LAYERS)]
    )
    assert code == 1
    missed = [text for text in capsys.readouterr().err.splitlines() if text.startswith("MISSED")]
    assert any(text.endswith(line) for text in missed), missed
