"""The check finds faults that are planted in built models: `scripts/bench planted`."""

from __future__ import annotations

from pathlib import Path

import pytest
from nets import residual
from shared_data import DRILLS

from benchmarks import planted
from benchmarks.planted_models import Subject
from benchmarks.planting import FAULTS

#: All of them in drills, else three that random inputs do not show.
_NAMES = {"index that starts at minus one", "epsilon outside the root", "phases in bf16"}


@pytest.mark.parametrize(
    "name", sorted(_NAMES if DRILLS == 1 else {fault.name for fault in FAULTS})
)
def test_planted_faults_are_found(
    name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    (fault,) = (each for each in FAULTS if each.name == name)
    verdict = planted.judge(Subject.of(fault))
    assert verdict.word == "wrong", verdict
    assert "inputs" in verdict.text or " on random" in verdict.rule


def test_a_right_model_is_not_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    verdict = planted.judge(Subject("residual", residual))
    assert verdict.word == "right", verdict
