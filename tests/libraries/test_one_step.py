"""`OneStepLibrary`: builds and measures in one step, and leaves nothing behind."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path

import pytest
from test_candidates import ToyLibrary

from tuna.artifacts.store import Artifacts
from tuna.configs import GemmConfig
from tuna.libraries.base import FINALS
from tuna.libraries.items import Rival, StepResult, WorkItem
from tuna.libraries.one_step import OneStepLibrary
from tuna.libraries.steps import find_step
from tuna.testing.rehearsal import run_context
from tuna.vocabulary import Cause

pytestmark = pytest.mark.service

Measure = Callable[..., StepResult]


class OneStepToy(OneStepLibrary, ToyLibrary):
    """The toy, built where it is measured."""


class NoStore(Artifacts):
    """A store in which a worker that only measures may not write."""

    def put(self, data: bytes) -> str:
        raise AssertionError("an artifact left the machine")


@pytest.fixture
def measure(
    tmp_path: Path, quick_timing: None, monkeypatch: pytest.MonkeyPatch
) -> Iterator[Measure]:
    """Run the step for some candidates; then the scratch folder is empty."""
    monkeypatch.setenv("PYTHONPATH", str(Path(__file__).parent), prepend=os.pathsep)
    library = OneStepToy()
    store = NoStore((tmp_path / "shared").as_uri(), tmp_path / "cache")
    context = replace(run_context(tmp_path), artifacts=store)

    def run(params: str, *rivals: Rival) -> StepResult:
        options = {
            "params": params,
            "candidates": 9,
            "build_timeout_s": 4,
            "measure_timeout_s": 4,
            "described": True,
        }
        item = WorkItem(
            job_id=1,
            attempt=1,
            session_id=1,
            library="toy",
            step=FINALS if rivals else "eval",
            rivals=rivals,
            solver="Toy",
            config=GemmConfig(2, 2, 2).to_json(),
            options=options,
        )
        assert [step.name for step in library.steps] == ["eval"]
        (result,) = library.run(find_step(library, item.step), [item], context)
        assert [path.name for path in context.scratch.rglob("*") if path.is_file()] == []
        return result

    yield run
    library.close()


def test_what_is_built_is_measured_and_keeps_its_params(measure: Measure) -> None:
    result = measure("good,build-raises,wrong,good")
    assert [trial.cause for trial in result.trials] == [
        None,
        Cause.BUILD_ERROR,
        Cause.WRONG_RESULT,
        None,
    ]
    assert [trial.params for trial in result.trials] == ["good", "build-raises", "wrong", "good"]
    assert [trial.time_ms is not None for trial in result.trials] == [True, False, False, True]
    assert [trial.build_s is not None for trial in result.trials] == [True, False, True, True]
    assert {trial.artifact for trial in result.trials} == {None}
    assert result.workload is None
    assert result.ok
    assert 0 < result.busy_s <= result.ended_at - result.started_at


def test_rivals_are_built_again_where_they_are_measured(measure: Measure) -> None:
    facts = {"solver": "Toy", "seed": 0, "number": 0, "time_ms": 0.001}
    options = {"params": "good,build-raises", "candidates": 2}
    rivals = [
        Rival(index=index, params=params, options=options, **facts)
        for index, params in ((7, "good"), (8, "build-raises"))
    ]
    result = measure("good", *rivals)
    assert [(trial.index, trial.params, trial.cause) for trial in result.trials] == [
        (7, "good", None), (8, "build-raises", Cause.BUILD_ERROR),
    ]  # fmt: skip
    assert result.ok


def test_where_nothing_is_built_nothing_is_measured(measure: Measure) -> None:
    result = measure("build-raises")
    assert (result.ok, result.cause) == (False, Cause.BUILD_ERROR)
    assert result.device is None
    assert (measure("none").cause, measure("fails").cause) == (
        Cause.NOT_APPLICABLE,
        Cause.BUILD_ERROR,
    )
