"""Candidates that crash, hang, eat memory or lie: each is a failed trial with its cause, and the
next one is measured."""

from __future__ import annotations

import subprocess
import time
from collections.abc import Callable
from pathlib import Path

import pytest
from shared_data import needed_program
from tvm_bench import Bench
from tvm_layers import DILATION, conv

from tuna.libraries.items import Trial
from tuna.libraries.measuring_processes import ForkedProcesses
from tuna.libraries.tvm import TvmLibrary
from tuna.settings import get_settings
from tuna.vocabulary import Cause

pytestmark = [pytest.mark.keeps_processes, pytest.mark.usefixtures("forked_children")]

NCHW = "TvmConvDirectNCHW"
#: What TVM calls in a compiled library. The bodies below are the candidates.
ENTRY = (
    "#include <stdlib.h>\n#include <unistd.h>\nint __tvm_ffi_main(void *h, void *a, int n, void *r)"
    " {{ {body} }}\n"
)


def bad_library(bench: Bench, folder: Path, body: str) -> str:
    """Put a library whose kernel is `body` into the artifact store."""
    source, built = folder / "bad.c", folder / "bad.so"
    source.write_text(ENTRY.format(body=body))
    subprocess.run(
        [needed_program("gcc"), "-O0", "-shared", "-fPIC", "-w", "-o", str(built), str(source)],
        check=True,
        timeout=60,
    )
    return bench.context.artifacts.put(built.read_bytes())


def good_candidates(bench: Bench) -> list[str | None]:
    return [trial.artifact for trial in bench.compile(conv(), NCHW).trials]


def test_each_bad_candidate_has_its_cause_and_the_others_are_measured(
    new_bench: Callable[[], Bench], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(TvmLibrary, "memory_bytes", 2 << 30)
    bench = new_bench()
    started = time.monotonic()
    first, last = good_candidates(bench)
    # same tensors, other answer
    other = bench.compile(conv(**DILATION), NCHW, candidates=1).trials[0].artifact
    # what is mapped counts, touched or not
    eat = "for (;;) { char *p = malloc(64 << 20); if (!p) abort(); *p = 1; }"
    candidates = [
        first,
        bad_library(bench, tmp_path, "*(volatile int *)0 = 1; return 0;"),
        bad_library(bench, tmp_path, "for (;;) pause();"),
        bad_library(bench, tmp_path, eat),
        bad_library(bench, tmp_path, "return 0;"),
        other,
        bad_library(bench, tmp_path, "exit(3);"),
        bench.context.artifacts.put(b"not a library"),
        last,
    ]
    result = bench.evaluate(conv(), NCHW, candidates, measure_timeout_s=10)
    causes = [trial.cause for trial in result.trials]
    errors = [
        Cause.RUN_ERROR,
        Cause.RUN_TIMEOUT,
        Cause.RUN_ERROR,
        Cause.WRONG_RESULT,
        Cause.WRONG_RESULT,
    ]
    assert causes == [None, *errors, Cause.RUN_ERROR, Cause.RUN_ERROR, None]
    tails = [trial.output_tail for trial in result.trials]
    assert "SIGSEGV" in tails[1]
    assert "SIGABRT" in tails[3]
    assert "exit code 3" in tails[6]
    assert result.trials[4].max_error is None  # nothing was written
    assert (result.trials[5].max_error or 0.0) > 0.01
    assert all(
        trial.time_ms is None and not trial.times_ms for trial in result.trials if trial.cause
    )
    assert all(trial.time_ms for trial in (result.trials[0], result.trials[-1]))
    assert result.ok
    assert result.cause is None
    # the limit of a candidate does not grow by that of a start
    assert time.monotonic() - started < 150


def test_an_item_whose_candidates_are_all_bad_fails_with_their_cause(
    bench: Bench, tmp_path: Path
) -> None:
    result = bench.evaluate(conv(), NCHW, [bad_library(bench, tmp_path, "return 0;")])
    assert (result.ok, result.cause) == (False, Cause.WRONG_RESULT)


@pytest.mark.parametrize("damage", ["gone", "changed"])
def test_an_artifact_that_is_lost_sends_the_item_back(
    bench: Bench, home: Path, damage: str
) -> None:
    (artifact,) = (
        trial.artifact
        for trial in bench.compile(conv(), NCHW, candidates=1, seed=len(damage)).trials
    )
    assert artifact is not None
    place = home / "artifacts" / artifact[:2] / artifact
    place.unlink() if damage == "gone" else place.write_bytes(b"damaged")
    result = bench.evaluate(conv(), NCHW, [artifact])
    assert (result.ok, result.cause, result.trials) == (False, Cause.ARTIFACT_LOST, ())
    place.unlink(missing_ok=True)


def test_all_repeats_are_kept_and_the_closest_candidates_are_measured_again(bench: Bench) -> None:
    """And an artifact may be evaluated again: a retry must not write over the library that the
    child has mapped."""
    candidate = good_candidates(bench)[0]
    assert bench.evaluate(conv(), NCHW, [candidate]).trials[0].cause is None
    assert isinstance(bench.library.processes, ForkedProcesses)
    parent = bench.library.processes.parent
    assert parent is not None
    starts = parent.starts
    result = bench.evaluate(conv(), NCHW, [candidate, candidate])
    assert parent.starts == starts
    assert [trial.cause for trial in result.trials] == [None, None]
    best = min(result.trials, key=lambda trial: trial.time_ms or 0)
    # equal code, so one candidate: in two fresh processes, three times at least, on a busy machine
    assert len(best.times_ms) >= 2 * 3
    for trial in result.trials:
        assert trial.time_ms is not None
        assert min(trial.times_ms) <= trial.time_ms <= max(trial.times_ms)
    assert result.device is not None
    assert (result.device.peak_gflops or 0) > 0
    assert 0 < result.busy_s <= result.ended_at - result.started_at + 0.1


def test_an_item_without_candidates_fails(bench: Bench) -> None:
    assert not bench.evaluate(conv(), NCHW, []).ok


def fake_linker(folder: Path, monkeypatch: pytest.MonkeyPatch, first_time: str) -> None:
    """A g++ that does `first_time` when it is called for the first time, and is the real one after
    that."""
    real = needed_program("g++")
    for name in ("CC", "CXX"):
        monkeypatch.delenv(name, raising=False)
    script = folder / "g++"
    flag = folder / "called"
    script.write_text(
        f'#!/bin/sh\nif [ ! -e {flag} ]; then touch {flag}; {first_time}; fi\nexec {real} "$@"\n'
    )
    script.chmod(0o755)
    monkeypatch.setenv("PATH", f"{folder}:/usr/bin:/bin")
    monkeypatch.setenv("TUNA_SANDBOX_WRITE", str(folder))
    get_settings.cache_clear()


def good(trials: tuple[Trial, ...]) -> list[tuple[int, str | None, str | None]]:
    return [(trial.index, trial.params, trial.artifact) for trial in trials if trial.cause is None]


@pytest.mark.parametrize(
    ("accident", "cause", "word"),
    [
        ("kill -SEGV $PPID", Cause.BUILD_ERROR, "SIGSEGV"),
        ("sleep 600", Cause.BUILD_TIMEOUT, "no answer within"),
    ],
)
def test_a_build_that_dies_or_hangs_is_one_failed_trial_and_the_rest_are_what_they_would_have_been(
    new_bench: Callable[[], Bench],
    bench: Bench,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    accident: str,
    cause: Cause,
    word: str,
) -> None:
    expected = bench.compile(conv(), NCHW)
    fake_linker(tmp_path, monkeypatch, accident)
    unlucky = new_bench()
    result = unlucky.compile(conv(), NCHW, build_timeout_s=5)
    assert [trial.cause for trial in result.trials] == [cause, None]
    assert word in result.trials[0].output_tail
    assert result.trials[0].params == expected.trials[0].params
    assert good(result.trials) == good(expected.trials)[1:]
    assert result.ok
    assert not list(unlucky.context.scratch.rglob("candidate-*"))


def test_a_job_without_one_good_build_fails_with_the_cause(
    new_bench: Callable[[], Bench], monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    for name in ("CC", "CXX"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("PATH", str(tmp_path))
    result = new_bench().compile(conv(), NCHW)
    assert (result.ok, result.cause, result.workload) == (False, Cause.BUILD_ERROR, None)
    assert [trial.artifact for trial in result.trials] == [None, None]
    assert result.output_tail
