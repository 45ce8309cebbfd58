"""Candidates that crash, hang, eat memory or lie: each is a failed trial with its cause, and the
next one is measured."""

from __future__ import annotations

import subprocess
from collections.abc import Callable
from pathlib import Path

import pytest
from settings_changes import change_setting
from shared_data import needed_program
from tvm_bench import Bench
from tvm_layers import DILATION, conv

from tuna.libraries.items import Trial
from tuna.libraries.tvm import TvmLibrary
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
    """Beside what `test_candidates.py` shows of every library."""
    monkeypatch.setattr(TvmLibrary, "memory_bytes", 2 << 30)
    bench = new_bench()
    first, last = good_candidates(bench)
    # same tensors, other answer
    other = bench.compile(conv(**DILATION), NCHW, candidates=1).trials[0].artifact
    # what is mapped counts, touched or not
    eat = "for (;;) { char *p = malloc(64 << 20); if (!p) abort(); *p = 1; }"
    candidates = [
        first,
        bad_library(bench, tmp_path, eat),
        bad_library(bench, tmp_path, "return 0;"),
        other,
        bad_library(bench, tmp_path, "exit(3);"),
        bench.context.artifacts.put(b"not a library"),
        last,
    ]
    result = bench.evaluate(conv(), NCHW, candidates, measure_timeout_s=60)
    wrong, error = [Cause.WRONG_RESULT] * 2, Cause.RUN_ERROR
    assert [trial.cause for trial in result.trials] == [None, error, *wrong, error, error, None]
    assert "SIGABRT" in result.trials[1].output_tail
    assert "exit code 3" in result.trials[4].output_tail
    assert result.trials[2].max_error is None  # nothing was written
    assert (result.trials[3].max_error or 0.0) > 0.01
    assert [trial.time_ms is None for trial in result.trials] == [
        trial.cause is not None for trial in result.trials
    ]
    assert (result.ok, result.cause) == (True, None)


def test_an_artifact_that_is_lost_sends_the_item_back(bench: Bench) -> None:
    result = bench.evaluate(conv(), NCHW, ["0" * 64])
    assert (result.ok, result.cause, result.trials) == (False, Cause.ARTIFACT_LOST, ())


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
    change_setting(monkeypatch, "TUNA_SANDBOX_WRITE", str(folder))


def good(trials: tuple[Trial, ...]) -> list[tuple[int, str | None, str | None]]:
    return [(trial.index, trial.params, trial.artifact) for trial in trials if trial.cause is None]


def test_a_build_that_dies_is_one_failed_trial_and_the_rest_are_what_they_would_have_been(
    new_bench: Callable[[], Bench], bench: Bench, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    expected = bench.compile(conv(), NCHW)
    fake_linker(tmp_path, monkeypatch, "kill -SEGV $PPID")
    unlucky = new_bench()
    result = unlucky.compile(conv(), NCHW)
    assert [trial.cause for trial in result.trials] == [Cause.BUILD_ERROR, None]
    assert "SIGSEGV" in result.trials[0].output_tail
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
