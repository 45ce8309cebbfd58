"""What `CandidateLibrary` does for every library: candidates that crash, hang or lie are failed
trials, the rest is measured."""

from __future__ import annotations

import contextlib
import dataclasses
import os
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from one_solver import OneSolverLibrary
from pydantic import Field, ValidationError

from tuna.artifacts.store import Artifacts
from tuna.configs import GemmConfig
from tuna.libraries.base import FINALS
from tuna.libraries.candidates import CandidateOptions
from tuna.libraries.contest import Budgets
from tuna.libraries.context import RunContext
from tuna.libraries.items import Rival, StepResult, WorkItem
from tuna.libraries.steps import find_step
from tuna.sandbox import core_lending
from tuna.sandbox.core_lending import BuildCores
from tuna.testing.rehearsal import follow, run_context
from tuna.vocabulary import Cause

pytestmark = pytest.mark.service

CPUS = sorted(os.sched_getaffinity(0))


class ToyOptions(CandidateOptions):
    """With what the toy is told to do."""

    params: str = Field("good", description="how its candidates behave, separated by commas")
    described: bool = Field(False, description="whether it describes its problem")


class ToyLibrary(OneSolverLibrary):
    """A 2 x 2 product that behaves as its options say."""

    name = "toy"
    device_name = "a toy"
    options = ToyOptions
    builder = "toy_kernel:Toy"
    loader = "toy_kernel:Toy"
    forkable = True


class Toys:
    """A library and what a worker lends it."""

    def __init__(self, folder: Path) -> None:
        self.library, self.context = ToyLibrary(), run_context(folder)

    def compile(self, *params: str, **options: Any) -> tuple[WorkItem, StepResult]:
        asked = {
            "params": ",".join(params),
            "candidates": len(params),
            "measure_timeout_s": 4,
            "build_timeout_s": 4,
        }
        options = {**asked, **options}
        config, item = (
            GemmConfig(2, 2, 2).to_json(),
            {"job_id": 1, "attempt": 1, "session_id": 1, "library": "toy"},
        )
        made = WorkItem(step="compile", solver="Toy", config=config, options=options, **item)
        return made, self._run(made, self.context)

    def measure(self, *params: str, **options: Any) -> StepResult:
        item, built = self.compile(*params, **options)
        assert built.ok, built.output_tail
        return self._run(follow(item, built, "eval"), self.context)

    def finals(self, *params: str) -> StepResult:
        """Of candidates of one job, each as if it had won another one."""
        item, built = self.compile(*params)
        facts = {"solver": "Toy", "seed": 0, "options": item.options, "time_ms": 0.001}
        rivals = tuple(
            Rival(
                index=70 + trial.index,
                number=trial.index,
                params=trial.params,
                artifact=trial.artifact,
                **facts,
            )
            for trial in built.trials
        )
        return self._run(item.model_copy(update={"step": FINALS, "rivals": rivals}), self.context)

    def _run(self, item: WorkItem, context: RunContext) -> StepResult:
        (result,) = self.library.run(find_step(self.library, item.step), [item], context)
        return result


@pytest.fixture
def toys(tmp_path: Path, quick_timing: None, monkeypatch: pytest.MonkeyPatch) -> Iterator[Toys]:
    monkeypatch.setenv("PYTHONPATH", str(Path(__file__).parent), prepend=os.pathsep)
    made = Toys(tmp_path)
    yield made
    made.library.close()


def test_each_bad_candidate_has_its_cause_and_the_good_are_measured(toys: Toys) -> None:
    ways = ["good", "dies", "hangs", "raises", "wrong", "nothing", "part", "keeps", "good"]
    result = toys.measure(*ways)
    wrong = 4 * [Cause.WRONG_RESULT]
    assert [trial.cause for trial in result.trials] == [
        None, Cause.RUN_ERROR, Cause.RUN_TIMEOUT, Cause.RUN_ERROR, *wrong, None,
    ]  # fmt: skip
    assert "SIGSEGV" in result.trials[1].output_tail
    assert "no answer within 4 s" in result.trials[2].output_tail
    assert "no such device" in result.trials[3].output_tail
    assert (result.trials[4].max_error or 0) > 0.1
    assert [trial.max_error for trial in result.trials[5:8]] == [None, None, None]
    told = {trial.output_tail for trial in result.trials[5:8]}
    assert told == {"not all of the output was written, or it holds NaN or infinity"}
    assert re.fullmatch(
        r"the largest error is \S+ of the largest value, more than \S+",
        result.trials[4].output_tail,
    )
    assert result.ok
    assert result.device is not None
    assert result.device.name == "a toy"
    assert (result.device.peak_gflops or 0) > 0
    assert [path.name for path in toys.context.scratch.rglob("*") if path.is_file()] == []


def test_finals_measure_what_other_jobs_built(toys: Toys) -> None:
    result = toys.finals("good", "dies", "good")
    assert [(trial.index, trial.params, trial.cause) for trial in result.trials] == [
        (70, "good", None), (71, "dies", Cause.RUN_ERROR), (72, "good", None),
    ]  # fmt: skip
    assert [len(trial.times_ms) >= Budgets.rival_processes for trial in result.trials] == [
        True,
        False,
        True,
    ]
    assert (result.ok, "Toy: the child ended" in result.output_tail.replace("\n", " ")) == (
        True,
        True,
    )
    assert [path.name for path in toys.context.scratch.rglob("*") if path.is_file()] == []


def test_each_bad_build_has_its_cause_and_the_rest_is_built(toys: Toys) -> None:
    ways = ["build-raises", "good", "build-dies", "build-hangs", "build-writes-nothing", "good"]
    _, result = toys.compile(*ways)
    error = Cause.BUILD_ERROR
    assert [trial.cause for trial in result.trials] == [
        error,
        None,
        error,
        Cause.BUILD_TIMEOUT,
        error,
        None,
    ]
    assert [trial.params for trial in result.trials] == ways
    assert "cc: no" in result.trials[0].output_tail
    assert "SIGSEGV" in result.trials[2].output_tail
    assert all((trial.build_s is None) is (trial.cause is not None) for trial in result.trials)
    assert result.ok
    assert [path.name for path in toys.context.scratch.rglob("*") if path.is_file()] == []


@pytest.mark.skipif(len(CPUS) < 2, reason="one core is never lent")
def test_builds_are_on_the_core_that_they_borrow_and_restarted_children_too(
    toys: Toys, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("tempfile.gettempdir", lambda: str(tmp_path))
    own = CPUS[:1]
    toys.context = dataclasses.replace(toys.context, cpus=tuple(own), builds=BuildCores(tuple(own)))
    says_where = ["build-says-where", "build-dies", "build-says-where"]
    with contextlib.ExitStack() as lent:
        core_lending.offer(lent, CPUS[-1:])
        lent.enter_context(BuildCores(tuple(own)).build(60.0))  # of another worker
        _, result = toys.compile(*says_where)
    assert _built(toys, result) == [str(CPUS[-1]), None, str(CPUS[-1])]
    _, result = toys.compile(*says_where)
    assert _built(toys, result) == [str(CPUS[0]), None, str(CPUS[0])]
    assert not any(map(core_lending._is_locked, core_lending._folder().glob("build-*")))


def _built(toys: Toys, result: StepResult) -> list[str | None]:
    return [
        toys.context.artifacts.get(one.artifact).decode() if one.artifact else None
        for one in result.trials
    ]


def test_a_candidate_is_made_of_what_another_worker_built(toys: Toys, tmp_path: Path) -> None:
    _, first = toys.compile("same-a", "other", "same-raises")
    assert _built(toys, first) == ["same-a", "other", "same-raises"]
    # nothing of the first one's process or folders but the store
    second = Toys(tmp_path / "second")
    artifacts = toys.context.artifacts
    second.context = dataclasses.replace(second.context, artifacts=artifacts)
    try:
        _, found = second.compile("same-b", "other")
        # a child that dies of it, and one that refuses, builds after all
        _, mended = second.compile("same-dies", "same-fails")
    finally:
        second.library.close()
    assert _built(toys, found) == ["same-b of same-a", "other"]
    assert _built(toys, mended) == ["same-dies", "same-fails"]
    assert all(one.build_s is not None for one in (*found.trials, *mended.trials))
    assert [path.name for path in second.context.scratch.rglob("*") if path.is_file()] == []


def test_a_build_is_shared_only_with_the_same_library_toolchain_and_body(
    toys: Toys, monkeypatch: pytest.MonkeyPatch
) -> None:
    toys.compile("same-a")
    item, _ = toys.compile("none")
    item = item.model_copy(update={"options": {**item.options, "params": "same-b"}})
    body = toys.context.artifacts.put(b"another kernel")
    other = toys._run(item.model_copy(update={"body": body}), toys.context)
    monkeypatch.setattr("tuna.libraries.candidates.toolchain_of", lambda _: "toy-2")
    newer = toys._run(item, toys.context)
    monkeypatch.undo()
    same = toys._run(item, toys.context)
    assert [_built(toys, one) for one in (other, newer, same)] == [
        ["same-b"],
        ["same-b"],
        ["same-b of same-a"],
    ]


def test_a_job_fails_with_the_cause_of_its_candidates_or_for_want_of_them(toys: Toys) -> None:
    causes = {way: toys.compile(way)[1].cause for way in ("build-raises", "none", "fails")}
    assert causes == {
        "build-raises": Cause.BUILD_ERROR, "none": Cause.NOT_APPLICABLE, "fails": Cause.BUILD_ERROR,
    }  # fmt: skip
    result = toys.measure("wrong")
    assert (result.ok, result.cause) == (False, Cause.WRONG_RESULT)


def test_no_more_candidates_are_built_than_were_asked_for(toys: Toys) -> None:
    _, result = toys.compile("good", "good", "good", candidates=2)
    assert len(result.trials) == 2


def test_the_problem_is_described_where_the_builder_does(toys: Toys) -> None:
    assert toys.compile("good")[1].workload is None
    described = toys.compile("good", described=True)[1].workload
    assert described is not None
    assert toys.context.artifacts.get(described) == b"the problem"


def test_the_closest_are_measured_again_and_all_repeats_are_kept(toys: Toys) -> None:
    slow, first, second = toys.measure("slow", "good", "good").trials
    assert len(slow.times_ms) >= 3
    # equal code, so one candidate: in two fresh processes, three times at least
    assert first.times_ms == second.times_ms
    assert len(first.times_ms) >= 2 * 3
    assert [slow.eligible, first.eligible, second.eligible] == [False, True, True]
    assert (slow.time_ms or 0) > 5 > (first.time_ms or 9)


def test_equal_code_of_a_later_round_has_the_times_of_the_earlier_one(toys: Toys) -> None:
    def measured(round_: int, *params: str) -> StepResult:
        item, built = toys.compile(*params)
        item = follow(item, built, "eval").model_copy(update={"job_id": round_, "round": round_})
        return toys._run(item, toys.context)

    first = measured(0, "dated", "wrong")
    later = measured(1, "dated-too", "dated", "wrong")
    assert later.trials[1].times_ms == first.trials[0].times_ms
    assert later.trials[0].times_ms != first.trials[0].times_ms
    assert later.trials[2].cause == Cause.WRONG_RESULT
    alone = measured(2, "dated")
    assert alone.ok
    assert alone.trials[0].times_ms == first.trials[0].times_ms
    assert (alone.device, alone.busy_s) == (later.device, 0)
    again = measured(0, "dated")  # an attempt that is repeated is measured anew
    assert again.trials[0].times_ms != first.trials[0].times_ms


def test_a_kernel_may_bring_its_own_clock(toys: Toys) -> None:
    (trial,) = toys.measure("clocked").trials
    assert set(trial.times_ms) == {42.0}


def test_the_limit_of_a_job_grows_with_its_candidates() -> None:
    library = ToyLibrary()
    compile_, eval_ = library.steps
    config = GemmConfig(2, 2, 2).to_json()

    def item(**options: Any) -> WorkItem:
        facts = {
            "job_id": 1,
            "attempt": 1,
            "session_id": 1,
            "library": "toy",
            "step": "compile",
            "solver": "Toy",
        }
        return WorkItem(config=config, options=options, **facts)

    assert library.time_limit_s(compile_, item()) == compile_.time_limit_s
    assert library.time_limit_s(compile_, item(candidates=1000, build_timeout_s=60)) > 60_000
    assert library.time_limit_s(eval_, item(candidates=1000, measure_timeout_s=60)) > 60_000


@pytest.mark.parametrize(
    "wrong", [{"candidates": 0}, {"candidates": 10_001}, {"build_timeout_s": 0}, {"other": 1}]
)
def test_options_that_make_no_sense_are_refused(wrong: dict[str, Any]) -> None:
    with pytest.raises(ValidationError):
        CandidateOptions.model_validate(wrong)


def test_what_is_checked_is_what_is_loaded(toys: Toys, monkeypatch: pytest.MonkeyPatch) -> None:
    """Whoever can write to a shared folder changes each file in it as soon as it was read."""
    item, built = toys.compile("good")
    store = toys.context.artifacts
    assert isinstance(store, Artifacts)
    read, changed = store._files.read, list[str]()

    def read_and_change(name: str) -> bytes:
        data = read(name)
        store._files.write(name, b"evil")
        changed.append(name)
        return data

    monkeypatch.setattr(store._files, "read", read_and_change)
    result = toys._run(follow(item, built, "eval"), toys.context)
    assert [trial.cause for trial in result.trials] == [None]
    assert changed == [built.trials[0].artifact]
    with pytest.raises(KeyError):
        store.get(built.trials[0].artifact or "")


@pytest.mark.parametrize("runs_bodies", [True, False])
def test_a_process_that_ran_the_code_of_one_body_builds_for_no_other(
    toys: Toys, monkeypatch: pytest.MonkeyPatch, runs_bodies: bool
) -> None:
    monkeypatch.setattr(ToyLibrary, "runs_bodies", runs_bodies)
    pids = []
    for body in (b"one", b"one", b"other", None):
        item, _ = toys.compile("good")
        digest = body and toys.context.artifacts.put(body)
        assert toys._run(item.model_copy(update={"body": digest}), toys.context).ok
        assert toys.library.compiler.child is not None
        pids.append(toys.library.compiler.child.pid)
    # between two of them the job without a body came
    assert len(set(pids)) == (4 if runs_bodies else 1)
