"""Whether a worker's machine and device are fit for work: examined before the first chunk and after
each failure.

What is the machine's or the device's own fault is not charged to a job. The worker takes nothing
more for a pause, longer each time, and until an examination finds nothing.
"""

from __future__ import annotations

import dataclasses
import errno
import os
import tempfile
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import NamedTuple

import structlog

from tuna.errors import LibraryMissing, StorageFull, StoreUnavailable
from tuna.libraries.base import Again, Library
from tuna.libraries.context import DeviceHandle, RunContext
from tuna.libraries.items import StepResult, WorkItem, tail
from tuna.libraries.steps import find_step
from tuna.sandbox.processes import ChildCancelled, ChildNotStarted
from tuna.vocabulary import Cause
from tuna.workers.link import Elsewhere

log = structlog.get_logger(__name__)

#: Seconds for `DeviceUse.probe`
PROBE_S = 60.0
#: Number of different jobs that fail in a row here while others succeed elsewhere
IN_A_ROW = 3
#: Number of failures in a row after which the device repeats an item that had succeeded, if no
#: other worker is there to compare with; if the item succeeds again, the failures are the jobs'
#: own, and the number doubles
_REPEAT_AFTER = 3
_FINAL = (Again.NEVER, Again.CONFIRMED)
#: Seconds for repeating an item, which must have taken half of it at most
REPEAT_S = 120.0
#: Number of successes in a row after which wrong answers are forgotten
TRUSTED = 20
#: Seconds of the first wait for other workers' heartbeats before a failure is judged
NEWS_S = 2.0
#: Seconds after the first failure of a worker without any success, for which it waits for another
#: worker to compare with
ALONE_S = 10.0
_TEST_BYTES = 1 << 20
_TICK_S = 0.5
#: Free bytes above which a candidate's "no space left" is blamed on the candidate, not on the disk
_ROOM_BYTES = 1 << 28
#: Errors of the machine, whatever the job: no space, quota, read-only or broken disk, no memory, no
#: processes or files left
_ERRNOS = frozenset(
    {
        errno.ENOSPC,
        errno.EDQUOT,
        errno.EROFS,
        errno.EIO,
        errno.ENOMEM,
        errno.EAGAIN,
        errno.EMFILE,
        errno.ENFILE,
    }
)
#: Messages of a foreign program without space. Its files are gone with it, so that the disk may
#: have space again.
_WORDS = tuple(os.strerror(number) for number in (errno.ENOSPC, errno.EDQUOT))
#: Causes that do not tell whether the machine is sound
_OF_THE_JOB = frozenset({Cause.ARTIFACT_LOST, Cause.NOT_APPLICABLE})


#: Repeats an item that had succeeded: see `Health.judge`
Repeats = Callable[[], bool | None]
_FAILS_AGAIN = "jobs fail here in a row, and so does one that had succeeded on this device"


def is_in_doubt(elsewhere: Elsewhere, failing_s: float) -> bool:
    """True if the failures of a worker that has never succeeded, the first of which was `failing_s`
    ago, may be its own: unless all others fail too, or there have been none for long enough."""
    return elsewhere.succeeds is not False if elsewhere.others else failing_s < ALONE_S


class Fault(NamedTuple):
    """Why a failure is not charged to the job."""

    cause: Cause
    text: str
    is_unfit: bool = True  #: true if the worker must not go on

    def charged_to_worker(self, result: StepResult) -> StepResult:
        """The result as a failure of this worker's; what it measured does not count."""
        text = f"{result.output_tail}\n{self.text}".strip()
        facts = {
            "ok": False,
            "cause": self.cause,
            "uncharged": True,
            "trials": (),
            "output_tail": tail(text),
        }
        return result.model_copy(update=facts)


class Unfit(Exception):
    """The worker must not go on with its chunk."""

    def __init__(self, fault: Fault) -> None:
        super().__init__(fault.text)
        self.fault = fault


class Health:
    """The health of one worker process with its device."""

    def __init__(
        self,
        folders: Sequence[Path],
        device: DeviceHandle | None = None,
        mend: Callable[[], None] = lambda: None,
        ending: Callable[[], bool] = lambda: False,
        *,
        first_pause_s: float = 2.0,
        longest_pause_s: float = 300.0,
    ) -> None:
        """`folders` must be writable; `mend` may repair the device, and is called before it is
        examined again.

        `ending`: whether the worker is to end, which a worker that is aside does at once.
        """
        self._folders, self._device, self._mend, self._ending = folders, device, mend, ending
        self._first_pause_s, self._longest_pause_s = first_pause_s, longest_pause_s
        self._pause_s = first_pause_s
        self._examined = False
        self._failed: set[int] = set()  # different jobs that failed since one succeeded
        #: jobs with a wrong answer, which one success does not outweigh
        self._wrong: set[int] = set()
        self._successes = 0  # in a row
        self._has_succeeded = False  # ever
        self._first_failed_at: float | None = None  # on the monotonic clock
        self._in_doubt = 0  # failures that were
        self._charged = 0  # failures since a success
        self._repeat_at = _REPEAT_AFTER
        self.fault: Fault | None = None  #: reason why the worker takes no work; None: it takes work

    @property
    def failing(self) -> int:
        """Return the number of different jobs that failed since one succeeded."""
        return len(self._failed)

    def require(self, library: Library) -> None:
        """Raise Unfit unless an examination has found nothing once."""
        if self._examined:
            return
        if fault := self.examine(library):
            raise Unfit(fault)
        self._examined = True

    def examine(self, library: Library) -> Fault | None:
        """Return the fault of the folders or, by the library's own word, of the device."""
        for folder in self._folders:
            try:
                _write_to(folder)
            except OSError as error:
                return Fault(Cause.INFRA, f"{folder} cannot be written: {error.strerror}")
        words = _probe(library, self._device, self._ending) if self._device else ""
        return (
            Fault(Cause.DEVICE_LOST, f"{self._device.id if self._device else ''}: {words}")
            if words
            else None
        )

    def judge(
        self,
        result: StepResult,
        library: Library,
        elsewhere: Callable[[], Elsewhere],
        repeats: Repeats = lambda: None,
    ) -> Fault | None:
        """Why the failure in `result` is or may be this worker's; None for one that is the job's,
        and for success.

        `elsewhere`: the workers that could do the same work. `repeats`: whether the device does
        again what it did before; None while it has done nothing.
        """
        if result.ok:
            self._has_succeeded = True
            self._failed.clear()
            self._charged, self._repeat_at = 0, _REPEAT_AFTER
            self._successes += 1
            if self._successes >= TRUSTED:
                self._wrong.clear()
            if not self._wrong:
                self._pause_s = self._first_pause_s
            return None
        if result.cause in _OF_THE_JOB:
            return None
        output = "\n".join([result.output_tail, *(trial.output_tail for trial in result.trials)])
        # any program can say them
        if any(words in output for words in _WORDS) and (fault := self._lack_of_room()):
            return fault
        # what is known need not be asked of a device that may not answer
        if result.cause is Cause.DEVICE_LOST:
            return Fault(Cause.DEVICE_LOST, tail(result.output_tail) or "the device was lost")
        if fault := self.examine(library):
            return fault
        self._successes = 0
        self._failed.add(result.job_id)
        if result.cause is Cause.WRONG_RESULT:
            self._wrong.add(result.job_id)
        cause = Cause.DEVICE_LOST if self._device else Cause.INFRA
        if not self._has_succeeded and (doubt := self._doubt(result, elsewhere(), cause)):
            return doubt
        count = max(len(self._failed), len(self._wrong))
        if count >= IN_A_ROW and self._succeeds(elsewhere, NEWS_S if count == IN_A_ROW else 0.0):
            return Fault(cause, f"{count} different jobs failed here, and others succeed elsewhere")
        self._charged += 1
        # A final failure is confirmed by another worker, where there is one.
        final = (
            find_step(library, result.step).retry(result.cause or Cause.INFRA).again in _FINAL
            and elsewhere().succeeds is False
        )
        if self._charged < self._repeat_at and not final:
            return None
        if repeats() is False:
            return Fault(cause, _FAILS_AGAIN)
        self._repeat_at = max(self._repeat_at, 2 * self._charged)
        return None

    def _doubt(self, result: StepResult, elsewhere: Elsewhere, cause: Cause) -> Fault | None:
        """Return why a failure may be the fault of this worker, which has never succeeded; `cause`
        is for one that surely is."""
        if self._first_failed_at is None:
            self._first_failed_at = time.monotonic()
        if not self._is_in_doubt(elsewhere):
            return None
        self._in_doubt += 1
        text = "nothing has succeeded here yet, and others succeed elsewhere"
        if not elsewhere.succeeds:
            cause = result.cause or Cause.INFRA
            text = f"nothing has succeeded here yet, the latest failed with {cause.value}, and"
            text += " whether others succeed is not known"
        return Fault(cause, text, is_unfit=self._in_doubt >= IN_A_ROW)

    def _is_in_doubt(self, elsewhere: Elsewhere) -> bool:
        first_at = self._first_failed_at
        return first_at is not None and is_in_doubt(elsewhere, time.monotonic() - first_at)

    def _lack_of_room(self) -> Fault | None:
        for folder in self._folders:
            try:
                with tempfile.TemporaryFile(dir=folder) as file:
                    os.posix_fallocate(file.fileno(), 0, _ROOM_BYTES)
            except OSError as error:
                if error.errno in _ERRNOS:
                    text = f"{folder} has less than {_ROOM_BYTES >> 20} MiB left: {error.strerror}"
                    return Fault(Cause.INFRA, text)
        return None

    @staticmethod
    def _succeeds(elsewhere: Callable[[], Elsewhere], wait_s: float) -> bool:
        deadline = time.monotonic() + wait_s
        while (found := elsewhere().succeeds) is None and time.monotonic() < deadline:
            time.sleep(wait_s / 20)
        return bool(found)

    def of_error(self, error: BaseException, library: Library) -> Fault | None:
        """Why an error that the library raised is the machine's fault; None if it is not."""
        for one in _chain(error):
            if isinstance(one, ChildNotStarted | LibraryMissing) or (
                isinstance(one, OSError) and one.errno in _ERRNOS
            ):
                return Fault(Cause.INFRA, f"{type(one).__name__}: {one}")
        return self.examine(library)

    def stay_aside(
        self,
        fault: Fault,
        library: Library,
        limit_s: float,
        elsewhere: Callable[[], Elsewhere],
        repeats: Repeats = lambda: None,
    ) -> None:
        """Wait until an examination finds nothing, and for a worker that has never succeeded until
        there is news of others, for `limit_s` at most; `fault` stays set if that is not by then.

        `elsewhere`, `repeats`: see `judge`.
        """
        if self.fault is None:
            library.close()  # children that are broken, or in the way of a repair
        self.fault = fault
        deadline = time.monotonic() + limit_s
        while self.fault and time.monotonic() < deadline:
            log.error("worker aside", reason=fault.text, pause_s=self._pause_s)
            self._sleep(min(self._pause_s, deadline - time.monotonic()))
            if self._ending():
                return
            self._pause_s = min(2 * self._pause_s, self._longest_pause_s)
            try:
                self._mend()
            except Exception as error:  # a hook of the user's, of which any may fail
                log.error("repair failed", error=str(error))
            self.fault = self.examine(library)
            if self.fault is None and repeats() is False:
                self.fault = Fault(fault.cause, _FAILS_AGAIN)
            if self.fault is None and not self._has_succeeded:
                news = elsewhere()
                self.fault = fault if self._is_in_doubt(news) and not news.succeeds else None
            fault = self.fault or fault
        if self.fault is None:
            self._examined = True
            log.warning("worker back")

    def _sleep(self, pause_s: float) -> None:
        until = time.monotonic() + pause_s
        while (left_s := until - time.monotonic()) > 0 and not self._ending():
            time.sleep(min(left_s, _TICK_S))


def to_repeat(item: WorkItem, result: StepResult, seconds: float) -> WorkItem | None:
    """The least of an item that succeeded in `seconds`: one of its good candidates, if it has some;
    None if that takes too long."""
    if item.rivals:
        return None
    good = {trial.index for trial in result.trials if trial.cause is None}
    candidates = tuple(candidate for candidate in item.candidates if candidate.index in good)[:1]
    is_quick = seconds / max(1, len(item.candidates)) <= REPEAT_S / 2
    return item.model_copy(update={"candidates": candidates}) if is_quick else None


def does_again(library: Library, item: WorkItem, context: RunContext) -> bool | None:
    """True if an item that succeeded succeeds again; None if that is not known: it was canceled, or
    its artifact is gone."""
    until = time.monotonic() + REPEAT_S
    in_time = dataclasses.replace(
        context, cancelled=lambda: context.cancelled() or time.monotonic() >= until
    )
    try:
        results = list(library.run(find_step(library, item.step), [item], in_time))
    except (StorageFull, StoreUnavailable):
        return None
    except ChildCancelled:
        return None if context.cancelled() else False
    except Exception as error:  # the library's own code, which has done this before
        log.warning("library failed to repeat an item", job=item.job_id, error=str(error))
        return False
    found = next((result for result in results if result.job_id == item.job_id), None)
    if found is not None and found.cause in _OF_THE_JOB:
        return None
    return found is not None and found.ok


def _chain(error: BaseException | None) -> Iterator[BaseException]:
    while error is not None:
        yield error
        error = error.__cause__ or error.__context__


def _write_to(folder: Path) -> None:
    folder.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryFile(dir=folder, buffering=0) as file:
        file.write(bytes(_TEST_BYTES))


def _probe(library: Library, device: DeviceHandle, ending: Callable[[], bool]) -> str:
    """Return the answer of `DeviceUse.probe`; one that raises or does not answer, also by the time
    of `ending`, is as good as a bad one."""
    said: list[str] = []

    def ask() -> None:
        try:
            said.append(library.device.probe(device))
        except Exception as error:  # the library's own code
            said.append(f"{type(error).__name__}: {error}")

    asking = threading.Thread(target=ask, name="probe", daemon=True)
    asking.start()
    until = time.monotonic() + PROBE_S
    while asking.is_alive() and (left_s := until - time.monotonic()) > 0 and not ending():
        asking.join(min(left_s, _TICK_S))
    return (
        said[0]
        if said
        else f"no answer to a probe within {PROBE_S:g} s, or before this worker was to end"
    )
