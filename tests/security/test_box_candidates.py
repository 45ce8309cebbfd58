"""Compiled candidates that try to get out of their box: failed trials, each with its cause, beside
good ones that are measured."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path

import psutil
import pytest
from box_place import HERE, Place
from one_solver import OneSolverLibrary
from shared_data import needed_program

from tuna.configs import GemmConfig
from tuna.libraries.candidates import CandidateOptions
from tuna.libraries.items import Trial, WorkItem
from tuna.libraries.steps import find_step
from tuna.testing.rehearsal import follow, run_context
from tuna.vocabulary import Cause

pytestmark = pytest.mark.usefixtures("needs_a_box")


class HostileLibrary(OneSolverLibrary):
    """Its candidates are acts of `box_acts.c`."""

    name, solver = "hostile", "Hostile"
    options = type(
        "Options", (CandidateOptions,), {"__annotations__": {"params": str}, "params": "good"}
    )
    builder = loader = "box_kernel:Hostile"
    forkable = True


@pytest.fixture
def measure(
    tuna_home: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> Iterator[Callable[[Sequence[str]], Sequence[Trial]]]:
    """`measure(["read /etc/shadow", "good"])`: the trials of these candidates, as a worker would
    report them."""
    needed_program("cc")
    monkeypatch.setenv("PYTHONPATH", str(HERE))
    library, context = HostileLibrary(), run_context(tmp_path)

    def measure(params: Sequence[str]) -> Sequence[Trial]:
        options = {"params": ",".join(params), "candidates": len(params), "finalists": 0}
        facts = {
            "job_id": 1,
            "attempt": 1,
            "session_id": 1,
            "library": "hostile",
            "options": options,
        }
        item = WorkItem(
            step="compile", solver="Hostile", config=GemmConfig(2, 2, 2).to_json(), **facts
        )
        (built,) = library.run(find_step(library, "compile"), [item], context)
        assert [trial.cause for trial in built.trials] == [None] * len(params), built.output_tail
        (measured,) = library.run(
            find_step(library, "eval"), [follow(item, built, "eval")], context
        )
        assert [path.name for path in context.scratch.rglob("*") if path.is_file()] == []
        return measured.trials

    yield measure
    library.close()


def test_a_candidate_that_leaves_its_box_is_a_failed_trial_and_the_others_are_measured(
    measure: Callable[[Sequence[str]], Sequence[Trial]],
    place: Place,
    victim: psutil.Popen,
    listener: str,
) -> None:
    hostile = [
        f"read {place.secret}", f"write {place.home}/planted", f"environ {os.getpid()}",
        f"mem {os.getpid()}",
        f"ptrace {os.getpid()}", f"kill {victim.pid}", "signal-all 0", f"tcp {listener}",
        "write OTHER", "delete OTHER",
        "fork 0", "bomb 100000", "program 0", "session 0", "large large", "outlive 0",
    ]  # fmt: skip
    trials = measure(["good", *hostile, "good"])
    assert [trial.cause for trial in trials] == [None, *[Cause.RUN_ERROR] * len(hostile), None]
    for act, trial in zip(hostile, trials[1:-1], strict=True):
        assert f"{act.partition(' ')[0]} refused" in trial.output_tail, trial.output_tail
    assert victim.poll() is None
    assert not place.harmed
    assert sorted(path.name for path in place.home.iterdir() if path.name == "planted") == []
    assert place.left_behind(allowed=3) == []
