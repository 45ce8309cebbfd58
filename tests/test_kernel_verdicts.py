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


def judged(
    results: list[LayerResult], cores: int = 1, data_type: DataType = DataType.FP32
) -> tuple[int, Outcome]:
    outcome = Outcome("kernels", {})
    for found in results:
        outcome.figures[f"{found.key} share of peak"] = found.best.share
    verdicts(outcome, results, cores, complete=len(results) > 1, data_type=data_type)
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


@pytest.mark.parametrize(("share", "code"), [(1.55, 0), (1.45, 1)])
def test_two_cores_have_limits_of_their_own(share: float, code: int) -> None:
    slow = [result("3x3_64@56", share=share)]
    assert (judged(slow, cores=2)[0], judged(slow)[0]) == (code, 1)


@pytest.mark.parametrize(
    ("dense", "others", "missed"),
    [
        (0.9, 0.3, ""),
        (0.87, 0.9, "0.87 of at least 0.88  3x3_64@56 native share of peak"),
        (0.9, 0.05, "1.128 of at most  0.97  native against oneDNN, geometric mean"),
    ],
)
def test_kernels_of_words_have_limits_of_their_own(
    dense: float, others: float, missed: str, capsys: pytest.CaptureFixture[str]
) -> None:
    """Depthwise layers and images have no limit but in the mean."""
    shares = {name: dense if name[:3] in ("1x1", "3x3") else others for name in LAYERS}
    code, _ = judged([result(name, share=shares[name]) for name in LAYERS], data_type=DataType.BF16)
    assert (code, missed in capsys.readouterr().err) == (bool(missed), True)
