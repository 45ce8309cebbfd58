"""Candidates that answer for their child: each is a failure of its own job, and nothing else
believes it."""

from __future__ import annotations

import json
import os
import random
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import pytest
from box_place import HERE
from one_solver import OneSolverLibrary
from pydantic import Field

from tuna.configs import GemmConfig
from tuna.libraries.candidate_children import answer_to
from tuna.libraries.candidates import CandidateOptions
from tuna.libraries.items import StepResult, WorkItem
from tuna.libraries.steps import find_step
from tuna.testing.rehearsal import follow, run_context
from tuna.vocabulary import Cause


class LyingOptions(CandidateOptions):
    """With the programs of the candidates."""

    programs: list[str] = Field(["good"], description="what its candidates do")


class LyingLibrary(OneSolverLibrary):
    """Its candidates are programs of `lying_kernel.py`."""

    name, solver = "lying", "Lying"
    options = LyingOptions
    builder = loader = "lying_kernel:Lying"
    forkable = True


class StartedLibrary(LyingLibrary):
    """The same without forks, as most plug-ins are."""

    forkable = False


Measure = Callable[..., list[StepResult]]


@pytest.fixture(
    params=[LyingLibrary, pytest.param(StartedLibrary, marks=pytest.mark.drill(only=True))]
)
def measure(
    request: pytest.FixtureRequest,
    tuna_home: Path,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    quick_timing: None,
) -> Iterator[Measure]:
    """`measure(["good"], ["answer('measure', 5)", "good"])`: the results of these jobs, as a worker
    would report them."""
    monkeypatch.setenv(
        "PYTHONPATH",
        os.pathsep.join([str(HERE), os.environ.get("PYTHONPATH", "")]).rstrip(os.pathsep),
    )
    library, context = request.param(), run_context(tmp_path)

    def measure(*jobs: Sequence[str], finalists: int = 0) -> list[StepResult]:
        items = []
        for number, programs in enumerate(jobs):
            options = {
                "programs": list(programs),
                "candidates": len(programs),
                "finalists": finalists,
            }
            facts = {
                "job_id": number,
                "attempt": 1,
                "session_id": 1,
                "library": "lying",
                "options": options,
            }
            item = WorkItem(
                step="compile", solver="Lying", config=GemmConfig(2, 2, 2).to_json(), **facts
            )
            (built,) = library.run(find_step(library, "compile"), [item], context)
            assert built.ok, built.output_tail
            items.append(follow(item, built, "eval"))
        return list(library.run(find_step(library, "eval"), items, context))

    yield measure
    library.close()


def is_right(result: StepResult) -> bool:
    """Whether a job of honest candidates was measured as if it were alone."""
    assert result.device is not None
    good = all(trial.cause is None and (trial.time_ms or 0) > 0 for trial in result.trials)
    return result.ok and good and 0 < (result.device.peak_gflops or 0) < 1e5


_TIMING = {
    "times_ms": [1.0],
    "time_ms": 1.0,
    "low_ms": 1.0,
    "high_ms": 1.0,
    "clock": "wall",
    "noisy": False,
}
_MEASURED = {"error": 0.0, "tolerance": 1e-4, "timing": _TIMING, "ended_early": False}


def test_answers_of_a_wrong_type_harm_no_candidate(measure: Measure) -> None:
    """5, {} and "abc" do not end the worker's loop as TypeError or ValidationError."""
    lies = [
        repr(5),
        "{}",
        repr("abc"),
        repr(_MEASURED | {"timing": _TIMING | {"time_ms": 1e308, "high_ms": 1e308}}),
    ]
    first, second = measure(
        ["good", *(word for lie in lies for word in (f"answer('measure', {lie})", "good"))],
        ["good"],
    )
    # A program speaks for the candidate after it, which is measured once more, in another process.
    assert [trial.cause for trial in first.trials] == [None] * 9
    assert is_right(second)


@pytest.mark.parametrize("probe", ["5", "{'gflops': 1e308, 'source': 'fma', 'copy_s': 1e-9}"])
def test_the_peak_and_the_drift_are_not_a_candidates_word(measure: Measure, probe: str) -> None:
    first, second = measure([f"answer('probe', {probe})", "good"], ["good"])
    assert is_right(first)
    assert is_right(second)


@pytest.mark.parametrize(
    "op",
    [
        "measure",
        *(
            pytest.param(op, marks=pytest.mark.drill(only=True))
            for op in ("prepare", "again", "save_inputs")
        ),
    ],
)
@pytest.mark.parametrize("measure", [LyingLibrary, StartedLibrary], indirect=True)
def test_a_child_that_a_candidate_took_over_answers_for_no_other_job(
    measure: Measure, op: str
) -> None:
    """It could report times of 0.0001 ms for what other jobs built."""
    first, second = measure(
        ["good", f"answer('{op}', {_MEASURED!r})"], ["good", "good"], finalists=2
    )
    assert is_right(second)
    assert {trial.cause for trial in first.trials} <= {None, Cause.RUN_ERROR}


def test_frames_beside_the_answer_reach_nobody_else(measure: Measure) -> None:
    """It may know the number of the next call; the pipe is not even to be found through /proc."""
    forged = "".join(json.dumps({"number": n, "result": _MEASURED}) + "\\n" for n in range(1, 200))
    programs = [
        f"frames({text!r}.encode().decode('unicode_escape'), 'measure')"
        for text in (forged, "{", "x" * 100_000, "\\n\\n")
    ]
    results = measure(*(job for one in programs for job in ([one, "good"], ["good"] * 2)))
    assert [is_right(result) for result in results[1::2]] == [True] * 4
    causes = {trial.cause for result in results[::2] for trial in result.trials}
    assert causes <= {None, Cause.RUN_ERROR}


@pytest.fixture
def little_memory(monkeypatch: pytest.MonkeyPatch) -> None:
    """Libraries that are made from now on give their children 512 MiB."""
    monkeypatch.setattr(LyingLibrary, "memory_bytes", 512 << 20)


def test_a_candidate_holds_no_more_memory_than_its_limit(
    little_memory: None, measure: Measure, needs_a_box: None
) -> None:
    """The limit of private memory does not count what was written and is read-only now."""
    program = """
import ctypes, mmap
once = "held" in globals()
held = []
try:
    for _ in range(0 if once else 48):
        held.append(mmap.mmap(-1, 64 << 20, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS))
        held[-1][:: mmap.PAGESIZE] = bytes((64 << 20) // mmap.PAGESIZE)
        place = ctypes.addressof(ctypes.c_char.from_buffer(held[-1]))
        assert ctypes.CDLL(None).mprotect(ctypes.c_void_p(place), 64 << 20, mmap.PROT_READ) == 0
    once or os._exit(9)
except (OSError, MemoryError):
    pass
"""
    (result,) = measure([program, "good"])
    assert [(trial.cause, trial.output_tail) for trial in result.trials] == [(None, "")] * 2


def _mutant(chance: random.Random, value: Any, depth: int = 0) -> Any:
    """The value with one part of it replaced."""
    wrong = [
        None, True, 5, -1, 2**70, 1.5, float("nan"), float("inf"), 1e308, 5e-324, -0.0, "", "abc",
        "x" * 300_000, "\ud800",
        [], [[]], {}, {"gflops": []}, [5] * 1000, {"a": {"b": {}}},
    ]  # fmt: skip
    if (depth and chance.random() < 0.5) or not isinstance(value, dict | list) or not value:
        return chance.choice(wrong)
    key = chance.choice(list(value) if isinstance(value, dict) else range(len(value)))
    if isinstance(value, dict):
        if chance.random() < 0.25:
            return {name: one for name, one in value.items() if name != key}
        return {**value, key: _mutant(chance, value[key], depth + 1)}
    if chance.random() < 0.5:
        return [*value, *value]
    return [*value[:key], _mutant(chance, value[key], depth + 1), *value[key + 1 :]]


_RIGHT = {
    "prepare": {},
    "probe": {"gflops": 50.0, "source": "fma", "copy_s": 1e-5},
    "measure": _MEASURED,
    "save_inputs": {"arrays": [[[2, 2], "float32"], [[2, 2], "float32"]]},
    "again": {"timings": [_TIMING, _TIMING]},
    "propose": {"params": ["a", "b"]},
    "workload": {"bytes": 3},
    "build": {"seconds": 0.5},
}


def test_2000_wrong_answers_raise_nothing_but_what_a_crash_is_made_of() -> None:
    """Whatever passes has the form and the bounds of a right answer."""
    chance = random.Random(25)
    for op, right in _RIGHT.items():
        check = answer_to({"op": op, "jobs": [1, 2]})
        assert check(json.loads(json.dumps(right))).items() >= right.items()
        for _ in range(250):
            wrong = _mutant(chance, right)
            try:
                found = check(wrong)
            except ValueError:
                continue
            assert found.keys() >= right.keys() or op == "probe"
            json.dumps(found, allow_nan=False)


def hostile(chance: random.Random) -> str:
    """A program that answers with a wrong type, too much, too little, or more than once."""
    wrong = _mutant(chance, _RIGHT["measure"])
    frame = json.dumps({"number": chance.randrange(1, 99), "result": wrong})
    ways = [
        f"answer('measure', {wrong!r})".replace("nan", "float('nan')").replace(
            "inf", "float('inf')"
        ),
        f"frames({frame!r} + chr(10))",
        f"frames({frame[: len(frame) // 2]!r})",
        f"frames(({frame!r} + chr(10)) * {chance.randrange(2, 2000)})",
        "os._exit(0)",
        "os.kill(os.getppid(), 9)",
        "answer('measure', 5); os.sched_setaffinity(os.getppid(), [0])",
    ]
    return chance.choice(ways)


@pytest.mark.timeout(1800)  # 200 answers: about 3 minutes on a quiet machine
@pytest.mark.parametrize("count", [3, pytest.param(200, marks=pytest.mark.drill(only=True))])
def test_after_every_hostile_answer_the_next_job_is_right(
    measure: Measure, count: int, capsys: pytest.CaptureFixture[str]
) -> None:
    chance = random.Random(count)
    programs = [hostile(chance) for _ in range(count)]
    results = measure(
        *(job for program in programs for job in (["good", program, "good"], ["good"]))
    )
    assert [is_right(result) for result in results[1::2]] == [True] * count
    causes = [trial.cause for result in results[::2] for trial in result.trials]
    # a lie may have the form of a wrong answer
    assert set(causes) <= {None, Cause.RUN_ERROR, Cause.WRONG_RESULT}
    with capsys.disabled():
        print(
            f"\n{count} hostile answers: {count} jobs after them right,"
            f" {causes.count(Cause.RUN_ERROR)} failed trials"
        )


@pytest.mark.parametrize(
    ("op", "answer", "said"),
    [
        (
            "measure",
            {"error": 0.0, "tolerance": 1.0, "timing": None, "parts": {"add_" * 70: 1.0}},
            "parts.add_add_.*: String should have at most 255 characters, not 280",
        ),
        ("measure", {"error": 0.0, "timing": None}, "tolerance: Field required"),
        ("propose", {"params": 5}, "params: Input should be a valid list"),
        ("again", {"timings": []}, "not one timing for each candidate"),
    ],
)
def test_an_answer_that_is_refused_is_told_by_its_field_and_the_limit(
    op: str, answer: dict[str, Any], said: str
) -> None:
    with pytest.raises(ValueError, match=said):
        answer_to({"op": op, "jobs": [1, 2]})(answer)
