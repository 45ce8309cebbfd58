"""The checker accepts a correct history and reports each kind of violation."""

from __future__ import annotations

from dataclasses import replace

import pytest
from history import Answer, Attempt, History, JobEnd, Run, objections, runs

GOOD, OTHER = Answer(1.5, "a" * 64), Answer(1.25, "b" * 64)
DONE = JobEnd("evaluated", 3, None, GOOD, GOOD)
#: The first attempt at the build was lost with its worker.
LOST = Attempt(1, "build", 1, ok=False, cause="worker_lost")
BUILT, MEASURED = Attempt(1, "build", 2, ok=True), Attempt(1, "measure", 3, ok=True)
RAN = [Run(1, "build", 1), Run(1, "build", 2), Run(1, "measure", 3)]
HISTORY = History({1: GOOD}, {1: DONE}, [LOST, BUILT, MEASURED], RAN)


def test_a_good_history_is_accepted() -> None:
    assert objections(HISTORY) == []


def test_the_same_attempt_may_run_twice_when_redis_forgot_that_it_was_taken() -> None:
    assert objections(replace(HISTORY, runs=[*RAN, RAN[1]])) == []


BAD = {
    "job 2 is lost": replace(HISTORY, expected={1: GOOD, 2: GOOD}),
    "job 1 was never loaded": replace(HISTORY, expected={}),
    "job 1 ended as compiling": replace(HISTORY, jobs={1: replace(DONE, state="compiling")}),
    "job 1 was given up: worker_lost": replace(
        HISTORY, jobs={1: replace(DONE, state="errored", cause="worker_lost")}
    ),
    "job 1 has 0 accepted results of measure": replace(HISTORY, attempts=[LOST, BUILT]),
    "job 1 has 2 accepted results of build": replace(
        HISTORY, attempts=[replace(LOST, ok=True), BUILT, MEASURED]
    ),
    "a result of measure was accepted for job 2, which has no such step": replace(
        HISTORY, attempts=[*HISTORY.attempts, replace(MEASURED, job=2)]
    ),
    "job 1: attempt 3 at measure was accepted and never ran": replace(HISTORY, runs=RAN[:2]),
    "job 1: attempt 2 at build was accepted after a later one had begun": replace(
        HISTORY, runs=[*RAN, Run(1, "build", 4)]
    ),
    "job 1: attempt 1 at build was accepted after a later one had begun": replace(
        HISTORY, attempts=[replace(LOST, ok=True), replace(BUILT, ok=False), MEASURED]
    ),
    "job 1: attempt 2 at measure was accepted before the step in front of it": replace(
        HISTORY, attempts=[LOST, BUILT, replace(MEASURED, attempt=2)]
    ),
    "job 1 was leased again after it was done": replace(
        HISTORY, jobs={1: replace(DONE, attempt=4)}
    ),
    f"job 1 is evaluated and its trial is {OTHER}, not {GOOD}": replace(
        HISTORY, jobs={1: replace(DONE, trial=OTHER)}
    ),
    f"job 1 is evaluated and its trial is None, not {GOOD}": replace(
        HISTORY, jobs={1: replace(DONE, trial=None)}
    ),
    f"job 1 is evaluated and the find db has None, not {GOOD}": replace(
        HISTORY, jobs={1: replace(DONE, stored=None)}
    ),
    f"job 1 is evaluated and the find db has {OTHER}, not {GOOD}": replace(
        HISTORY, jobs={1: replace(DONE, stored=OTHER)}
    ),
}


@pytest.mark.parametrize("words", BAD)
def test_a_bad_history_is_objected_to(words: str) -> None:
    assert words in objections(BAD[words])


def test_the_librarys_log_is_read() -> None:
    assert list(runs(['{"job": 1, "step": "build", "attempt": 2, "pid": 7, "at": 0.5}'])) == [
        Run(1, "build", 2)
    ]
