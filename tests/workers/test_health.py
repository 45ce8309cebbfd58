"""What a worker takes for the fault of its own machine or device, and how it comes back."""

from __future__ import annotations

import dataclasses
import errno
import os
import threading
import time
from collections.abc import Iterator, Sequence
from pathlib import Path

import pytest

from tuna.artifacts.store import Artifacts
from tuna.errors import LibraryMissing, StoreUnavailable
from tuna.libraries.base import Step
from tuna.libraries.context import DeviceHandle, RunContext
from tuna.libraries.device_use import DeviceUse
from tuna.libraries.items import Candidate, StepResult, Trial, WorkItem, result_of
from tuna.sandbox.processes import run
from tuna.testing.noop import NoopLibrary
from tuna.vocabulary import Cause
from tuna.workers import examination, repetition
from tuna.workers import health as healths
from tuna.workers.examination import Fault
from tuna.workers.health import ALONE_S, Health, Unfit, is_in_doubt
from tuna.workers.link import Elsewhere

GPU = DeviceHandle("GPU-a", "GPU-a")
ITEM = WorkItem(
    job_id=7, attempt=1, session_id=1, library="noop", step="measure", solver="Noop1", config={}
)
NOBODY = Elsewhere(succeeds=False)
NO_NEWS = Elsewhere(others=True)
SUCCEEDS = Elsewhere(others=True, succeeds=True)
FAILS = Elsewhere(others=True, succeeds=False)


class Card(NoopLibrary):
    """Its device says `words` when it is asked."""

    words = ""

    def __init__(self) -> None:
        self.device = DeviceUse(probe=self.probe)

    def probe(self, device: DeviceHandle) -> str:
        return self.words


def failed(
    cause: Cause, output: str = "", *, job_id: int = 1, trial_output: str = ""
) -> StepResult:
    trials = (Trial(index=0, cause=cause, output_tail=trial_output),)
    return StepResult(
        job_id=job_id,
        attempt=1,
        step="measure",
        ok=False,
        cause=cause,
        output_tail=output,
        trials=trials,
    )


def proven(folders: Sequence[Path] = (), device: DeviceHandle | None = None) -> Health:
    """The health of a worker that has succeeded once."""
    health = Health(folders, device)
    assert health.judge(good(), Card(), lambda: NOBODY) is None
    return health


def good(job_id: int = 1) -> StepResult:
    return StepResult(job_id=job_id, attempt=1, step="measure", ok=True)


def test_a_dead_device_is_found_before_the_first_chunk_and_after_a_failure(tmp_path: Path) -> None:
    card, health = Card(), Health([tmp_path], GPU)
    health.require(card)
    assert health.judge(failed(Cause.RUN_ERROR), card, lambda: FAILS) is None
    card.words = "fell off the bus"
    health.require(card)  # once is enough
    assert health.judge(good(), card, lambda: FAILS) is None
    fault = Fault(Cause.DEVICE_LOST, "GPU-a: fell off the bus")
    assert health.judge(failed(Cause.RUN_TIMEOUT), card, lambda: FAILS) == fault
    with pytest.raises(Unfit):
        Health([tmp_path], GPU).require(card)
    assert list(tmp_path.iterdir()) == []


def test_a_probe_that_hangs_or_raises_has_answered(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    class Hangs(Card):
        def probe(self, device: DeviceHandle) -> str:
            time.sleep(5.0)
            return ""

    class Raises(Card):
        def probe(self, device: DeviceHandle) -> str:
            raise RuntimeError("no driver")

    with monkeypatch.context() as soon:
        soon.setattr(examination, "PROBE_S", 0.05)
        assert Health([], GPU).examine(Hangs()) == Fault(
            Cause.DEVICE_LOST,
            "GPU-a: no answer to a probe within 0.05 s, or before this worker was to end",
        )
    assert Health([], GPU).examine(Raises()) == Fault(
        Cause.DEVICE_LOST, "GPU-a: RuntimeError: no driver"
    )


SAID = [
    ("fin: write: No space left on device", ""),
    ("", "OSError: [Errno 122] Disk quota exceeded"),
]


@pytest.mark.parametrize(("output", "trial_output"), SAID)
def test_a_disk_without_room_is_looked_for_where_a_program_said_so(
    output: str, trial_output: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A full disk is not a `build_error` of the job, although the files that filled it are gone."""

    def refuse(_fd: int, _offset: int, size_bytes: int) -> None:
        assert size_bytes > 1 << 20
        raise OSError(errno.EDQUOT, os.strerror(errno.EDQUOT))

    monkeypatch.setattr(os, "posix_fallocate", refuse)
    result = failed(Cause.BUILD_ERROR, output, trial_output=trial_output)
    found = Health([tmp_path]).judge(result, Card(), lambda: FAILS)
    assert found == Fault(
        Cause.INFRA, f"{tmp_path} has less than 256 MiB left: Disk quota exceeded"
    )
    assert (
        Health([tmp_path]).judge(failed(Cause.BUILD_ERROR, "a bug"), Card(), lambda: FAILS) is None
    ), "nobody said so"


@pytest.mark.parametrize(("output", "trial_output"), SAID)
def test_words_alone_put_no_worker_aside(output: str, trial_output: str, tmp_path: Path) -> None:
    """Any candidate can print them."""
    result = failed(Cause.RUN_ERROR, output, trial_output=trial_output)
    assert Health([tmp_path]).judge(result, Card(), lambda: FAILS) is None
    assert list(tmp_path.iterdir()) == []


def test_a_folder_that_cannot_be_written_is_a_fault(tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    found = Health([tmp_path, tmp_path / "file" / "scratch"]).examine(Card())
    assert found
    assert found.cause is Cause.INFRA
    assert "cannot be written: Not a directory" in found.text


@pytest.mark.parametrize(
    ("error", "is_fault"),
    [
        (OSError(errno.ENOSPC, "full"), True),
        (OSError(errno.EDQUOT, "full"), True),
        (LibraryMissing("the driver is gone"), True),
        (FileNotFoundError(errno.ENOENT, "a bug"), False),
        (ValueError("a bug"), False),
    ],
)
def test_errors_of_the_machine_are_told_from_bugs(error: Exception, is_fault: bool) -> None:
    wrapped = RuntimeError("failed")
    wrapped.__cause__ = error
    for one in (error, wrapped):
        assert (Health([]).of_error(one, Card()) is not None) is is_fault


def test_a_child_that_cannot_be_started_is_the_machines_fault(tmp_path: Path) -> None:
    with pytest.raises(Exception, match="cannot be started") as caught:
        run(["true"], timeout_s=10.0, cwd=tmp_path / "gone")
    assert Health([]).of_error(caught.value, Card())


def test_three_different_jobs_in_a_row_count_if_others_succeed(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(healths, "NEWS_S", 0.05)
    card, news = Card(), [NO_NEWS, NO_NEWS, SUCCEEDS]
    health = proven([], GPU)
    for job_id in (1, 1, 2):  # one job twice is not two
        assert health.judge(failed(Cause.RUN_ERROR, job_id=job_id), card, lambda: FAILS) is None
    found = health.judge(failed(Cause.RUN_ERROR, job_id=3), card, lambda: news.pop(0))
    assert found == Fault(
        Cause.DEVICE_LOST, "3 different jobs failed here, and others succeed elsewhere"
    )
    assert news == [], "it waited for news of the others"


@pytest.mark.parametrize("elsewhere", [NO_NEWS, FAILS, NOBODY])
def test_what_fails_everywhere_is_the_jobs_own_fault(
    elsewhere: Elsewhere, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(healths, "NEWS_S", 0.0)
    health = proven([], GPU)
    assert [
        health.judge(failed(Cause.RUN_ERROR, job_id=n), Card(), lambda: elsewhere) for n in range(9)
    ] == [None] * 9


@pytest.mark.parametrize(
    ("elsewhere", "failing_s", "expected"),
    [
        (NOBODY, 0.0, True),
        (NOBODY, ALONE_S, False),
        (Elsewhere(), 0.0, True),
        (Elsewhere(), ALONE_S, False),
        (NO_NEWS, 0.0, True),
        (NO_NEWS, ALONE_S, True),
        (SUCCEEDS, ALONE_S, True),
        (FAILS, 0.0, False),
    ],
)
def test_failures_of_a_worker_that_has_never_succeeded_are_in_doubt_until_others_fail_too(
    elsewhere: Elsewhere, failing_s: float, expected: bool
) -> None:
    assert is_in_doubt(elsewhere, failing_s) is expected


def test_a_worker_that_has_never_succeeded_is_aside_after_three_failures_and_charges_none(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    def judged(elsewhere: Elsewhere) -> Fault:
        found = health.judge(failed(Cause.BUILD_ERROR, "no compiler"), Card(), lambda: elsewhere)
        assert found is not None
        return found

    health = Health([])
    faults = [judged(NOBODY), judged(NO_NEWS), judged(NOBODY)]
    assert [(one.cause, one.is_unfit) for one in faults] == [
        (Cause.BUILD_ERROR, False),
        (Cause.BUILD_ERROR, False),
        (Cause.BUILD_ERROR, True),
    ]
    charged = faults[0].charged_to_worker(failed(Cause.BUILD_ERROR, "no compiler"))
    assert (charged.cause, charged.uncharged, charged.trials) == (Cause.BUILD_ERROR, True, ())
    assert "no compiler" in charged.output_tail
    assert judged(SUCCEEDS)[::2] == (Cause.INFRA, True)
    monkeypatch.setattr(healths, "ALONE_S", 0.0)
    assert health.judge(failed(Cause.BUILD_ERROR), Card(), lambda: NOBODY) is None


@pytest.mark.parametrize("last", [SUCCEEDS, FAILS])
def test_a_worker_stays_in_quarantine_until_there_is_news_of_others(
    last: Elsewhere, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(Health, "_sleep", lambda _, pause_s: None)
    health, news = Health([]), [NOBODY, NO_NEWS, last]
    fault = health.judge(failed(Cause.BUILD_ERROR), Card(), lambda: NOBODY)
    assert fault
    health.stay_aside(fault, Card(), 60.0, lambda: news.pop(0))
    assert (news, health.fault) == ([], None)


def test_one_success_outweighs_crashes_and_not_wrong_answers() -> None:
    for cause, ends in ((Cause.RUN_ERROR, False), (Cause.WRONG_RESULT, True)):
        health, found = proven([], GPU), list[Fault | None]()
        for job_id in range(4):
            found.append(health.judge(failed(cause, job_id=job_id), Card(), lambda: SUCCEEDS))
            health.judge(good(), Card(), lambda: SUCCEEDS)
        assert any(found) is ends


def test_where_nobody_else_is_the_device_repeats_what_it_did_after_ever_more_failures() -> None:
    health, asked = proven([], GPU), list[int]()

    def fails(number: int, cause: Cause, *, again: bool | None) -> Fault | None:
        return health.judge(
            failed(cause, job_id=number),
            Card(),
            lambda: FAILS,
            lambda: asked.append(number) or again,
        )

    assert not any(fails(number, Cause.RUN_ERROR, again=True) for number in range(1, 14))
    assert asked == [3, 6, 12]
    health.judge(good(), Card(), lambda: FAILS)
    asked.clear()
    assert not fails(20, Cause.WRONG_RESULT, again=True)
    assert not fails(21, Cause.NOT_APPLICABLE, again=True), "that says nothing of a device"
    assert not fails(22, Cause.RUN_ERROR, again=True)
    found = fails(23, Cause.RUN_ERROR, again=False)
    assert asked == [20, 23], "what is final at once, and the third in a row"
    assert found
    assert (found.cause, "one that had succeeded" in found.text) == (Cause.DEVICE_LOST, True)


def test_a_final_failure_that_others_are_there_to_confirm_needs_no_repetition() -> None:
    def never() -> bool:
        raise AssertionError

    result = failed(Cause.WRONG_RESULT)
    assert proven([], GPU).judge(result, Card(), lambda: SUCCEEDS, never) is None
    assert proven([], GPU).judge(result, Card(), lambda: NO_NEWS, never) is None


def test_a_worker_stays_in_quarantine_until_the_device_repeats_what_it_did(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(Health, "_sleep", lambda _, pause_s: None)
    health, answers = Health([], GPU), [True, False, False]
    health.stay_aside(
        Fault(Cause.DEVICE_LOST, "x"), Card(), 60.0, lambda: NOBODY, lambda: answers.pop()
    )
    assert (answers, health.fault) == ([], None)


@pytest.mark.parametrize(
    ("end", "again"),
    [
        (Cause.RUN_ERROR, False),
        (Cause.ARTIFACT_LOST, None),
        (StoreUnavailable("x"), None),
        (ValueError("x"), False),
        (None, True),
    ],
)
def test_the_end_of_a_repeated_item_decides_who_is_at_fault(
    end: Cause | Exception | None, again: bool | None, tmp_path: Path
) -> None:
    class Ends(Card):
        def run(
            self, step: Step, items: Sequence[WorkItem], context: RunContext
        ) -> Iterator[StepResult]:
            if isinstance(end, Exception):
                raise end
            yield result_of(items[0], ok=end is None, cause=end)

    store = Artifacts(tmp_path.as_uri(), tmp_path)
    assert repetition.does_again(Ends(), ITEM, RunContext(store, tmp_path, (0,), GPU)) is again


def test_a_repeated_item_that_hangs_fails(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    class Hangs(Card):
        def run(
            self, step: Step, items: Sequence[WorkItem], context: RunContext
        ) -> Iterator[StepResult]:
            run(["sleep", "60"], timeout_s=60.0, cancelled=context.cancelled, box=None)
            yield result_of(items[0], ok=True)

    monkeypatch.setattr(repetition, "REPEAT_S", 0.1)
    context = RunContext(Artifacts(tmp_path.as_uri(), tmp_path), tmp_path, (0,), GPU)
    assert repetition.does_again(Hangs(), ITEM, context) is False
    canceled = dataclasses.replace(context, cancelled=lambda: True)
    assert repetition.does_again(Hangs(), ITEM, canceled) is None


def test_of_an_item_one_good_candidate_is_repeated_if_that_is_quick() -> None:
    candidates = tuple(Candidate(index=number, artifact="a" * 64) for number in range(3))
    item = ITEM.model_copy(update={"candidates": candidates})
    trials = (Trial(index=0, cause=Cause.RUN_ERROR), Trial(index=1), Trial(index=2))
    seconds = 3 * repetition.REPEAT_S / 2
    result = good().model_copy(update={"trials": trials})
    assert repetition.to_repeat(item, result, seconds) == ITEM.model_copy(
        update={"candidates": candidates[1:2]}
    )
    assert repetition.to_repeat(item, result, seconds + 1.0) is None


def test_a_worker_comes_back_by_itself_when_the_hook_has_helped(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    card, pauses = Card(), list[float]()
    card.words = "fell off the bus"

    def mend() -> None:
        if len(pauses) == 3:
            card.words = ""
        raise OSError("the hook failed, which is only logged")

    monkeypatch.setattr(Health, "_sleep", lambda _, pause_s: pauses.append(pause_s))
    health = Health([], GPU, mend, first_pause_s=2.0, longest_pause_s=5.0)
    health.stay_aside(Fault(Cause.DEVICE_LOST, "x"), card, 60.0, lambda: NOBODY)
    assert pauses == [2.0, 4.0, 5.0]
    assert health.fault is None


def test_a_worker_in_quarantine_ends_at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    class Hangs(Card):
        def probe(self, device: DeviceHandle) -> str:
            threading.Event().wait(60)
            return ""

    asked = threading.Event()
    health = Health([], GPU, ending=asked.is_set, first_pause_s=60.0)
    threading.Timer(0.1, asked.set).start()
    started = time.monotonic()
    health.stay_aside(Fault(Cause.DEVICE_LOST, "the board vanished"), Card(), 60.0, lambda: NOBODY)
    assert health.fault, "nothing was examined"
    assert Health([], GPU, ending=asked.is_set).examine(Hangs())
    assert time.monotonic() - started < 50


def test_a_worker_stays_in_quarantine_for_no_longer_than_it_may() -> None:
    card = Card()
    card.words = "fell off the bus"
    health = Health([], GPU, first_pause_s=0.01)
    health.stay_aside(Fault(Cause.DEVICE_LOST, "x"), card, 0.02, lambda: NOBODY)
    assert health.fault == Fault(Cause.DEVICE_LOST, "GPU-a: fell off the bus")


def test_words_of_this_system_are_known() -> None:
    assert os.strerror(errno.ENOSPC) == "No space left on device"
