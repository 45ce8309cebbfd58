"""Cases of ONNX's own node tests, by the rule of `benchmarks/conformance.py`."""

from __future__ import annotations

from collections import Counter
from functools import cache

import pytest
from shared_data import DRILLS

from benchmarks import conformance
from benchmarks.conformance import Case

#: Every twelfth case of one operator in six (in drills every sixth case of all), in parts that are
#: tests of their own; all are judged by `scripts/bench conformance`.
_OPERATORS, _STEP, _PARTS = (6, 12, 1) if DRILLS == 1 else (1, 6, 6)


@cache
def sample() -> list[Case]:
    return sorted(conformance.current_cases(_OPERATORS), key=lambda case: case.name)[::_STEP]


@pytest.mark.tvm
@pytest.mark.parametrize("part", range(_PARTS))
def test_onnx_node_tests_are_right_or_refused_in_a_sentence(part: int) -> None:
    cases = sample()[part::_PARTS]
    verdicts = {case.name: conformance.judge(case) for case in cases}
    bad = {name: one for name, one in verdicts.items() if one.word not in ("right", "refused")}
    assert not bad
    counts = Counter(verdict.word for verdict in verdicts.values())
    assert counts["right"] >= 0.75 * len(cases) > 15
