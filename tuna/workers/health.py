"""Whether a worker's machine and device are fit for work: examined before the first chunk and after
each failure.

What is the machine's or the device's own fault is not charged to a job. The worker takes nothing
more for a pause, longer each time, and until an examination finds nothing.
"""

from __future__ import annotations

import dataclasses
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import NamedTuple

import structlog

from tuna.libraries.base import Again, Library
from tuna.libraries.context import DeviceHandle
from tuna.libraries.items import StepResult, tail
from tuna.libraries.steps import find_step
from tuna.vocabulary import Cause
from tuna.workers.examination import NO_SPACE, Fault, examined, lack_of_room, machine_error
from tuna.workers.link import Elsewhere
from tuna.workers.repetition import OF_THE_JOB

log = structlog.get_logger(__name__)

#: Number of different jobs that fail in a row here while others succeed elsewhere
IN_A_ROW = 3
#: Number of failures in a row after which the device repeats an item that had succeeded, if no
#: other worker is there to compare with; if the item succeeds again, the failures are the jobs'
#: own, and the number doubles
_REPEAT_AFTER = 3
_FINAL = (Again.NEVER, Again.CONFIRMED)
#: Number of successes in a row after which wrong answers are forgotten
TRUSTED = 20
#: Seconds of the first wait for other workers' heartbeats before a failure is judged
NEWS_S = 2.0
#: Seconds after the first failure of a worker without any success, for which it waits for another
#: worker to compare with
ALONE_S = 10.0
_TICK_S = 0.5
#: Repeats an item that had succeeded: see `Health.judge`
Repeats = Callable[[], bool | None]
_FAILS_AGAIN = "jobs fail here in a row, and so does one that had succeeded on this device"


def is_in_doubt(elsewhere: Elsewhere, failing_s: float) -> bool:
    """True if the failures of a worker that has never succeeded, the first of which was `failing_s`
    ago, may be its own: unless all others fail too, or there have been none for long enough."""
    return elsewhere.succeeds is not False if elsewhere.others else failing_s < ALONE_S


class Unfit(Exception):
    """The worker must not go on with its chunk."""

    def __init__(self, fault: Fault) -> None:
        super().__init__(fault.text)
        self.fault = fault


@dataclasses.dataclass
class _Record:
    """What the worker's jobs came to so far."""

    #: different jobs that failed since one succeeded
    failed: set[int] = dataclasses.field(default_factory=set)
    #: jobs with a wrong answer, which one success does not outweigh
    wrong: set[int] = dataclasses.field(default_factory=set)
    successes: int = 0  #: number of successes in a row
    has_succeeded: bool = False  #: true once a job succeeded
    first_failed_at: float | None = None  #: time of the first failure, on the monotonic clock
    doubted: int = 0  #: number of failures of a worker that may be unfit itself
    charged: int = 0  #: number of failures since a success that were charged to their jobs
    repeat_at: int = _REPEAT_AFTER  #: value of `charged` at which an item is repeated

    def succeed(self) -> None:
        """Count a success."""
        self.has_succeeded = True
        self.failed.clear()
        self.charged, self.repeat_at = 0, _REPEAT_AFTER
        self.successes += 1
        if self.successes >= TRUSTED:
            self.wrong.clear()

    def fail(self, result: StepResult) -> None:
        """Count a failure that an examination does not explain."""
        self.successes = 0
        self.failed.add(result.job_id)
        if result.cause is Cause.WRONG_RESULT:
            self.wrong.add(result.job_id)
        if self.first_failed_at is None:
            self.first_failed_at = time.monotonic()

    def charge(self, *, repeated: bool) -> None:
        """Count a failure of the job's own; `repeated`: an item was repeated and succeeded."""
        self.charged += 1
        if repeated:
            self.repeat_at = max(self.repeat_at, 2 * self.charged)

    @property
    def in_a_row(self) -> int:
        """Return the number of different jobs that failed in a row."""
        return max(len(self.failed), len(self.wrong))

    def is_in_doubt(self, elsewhere: Elsewhere) -> bool:
        first_at = self.first_failed_at
        return first_at is not None and is_in_doubt(elsewhere, time.monotonic() - first_at)


class JudgedFailure(NamedTuple):
    """A failure to be judged, with what its rules may ask."""

    result: StepResult
    library: Library
    elsewhere: Callable[[], Elsewhere]
    repeats: Repeats

    @property
    def says_no_space(self) -> bool:
        """Return whether its output does, as any program can."""
        trials = (trial.output_tail for trial in self.result.trials)
        output = "\n".join([self.result.output_tail, *trials])
        return any(words in output for words in NO_SPACE)

    @property
    def is_final(self) -> bool:
        """Return whether no other worker will confirm it, where one should."""
        cause = self.result.cause or Cause.INFRA
        retry = find_step(self.library, self.result.step).retry(cause)
        return retry.again in _FINAL and self.elsewhere().succeeds is False


class Rule(NamedTuple):
    """A rule by which a failure is the worker's fault rather than the job's."""

    name: str
    when: Callable[[Health, JudgedFailure], bool]  #: true if the verdict is asked for
    verdict: Callable[[Health, JudgedFailure], Fault | None]  #: None: the next rule decides


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
        self._record = _Record()
        self.fault: Fault | None = None  #: reason why the worker takes no work; None: it takes work

    @property
    def failing(self) -> int:
        """Return the number of different jobs that failed since one succeeded."""
        return len(self._record.failed)

    def require(self, library: Library) -> None:
        """Raise Unfit unless an examination has found nothing once."""
        if self._examined:
            return
        if fault := self.examine(library):
            raise Unfit(fault)
        self._examined = True

    def examine(self, library: Library) -> Fault | None:
        """Return the fault of the folders or, by the library's own word, of the device."""
        return examined(self._folders, self._device, library, self._ending)

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
            self._record.succeed()
            if not self._record.wrong:
                self._pause_s = self._first_pause_s
            return None
        if result.cause in OF_THE_JOB:
            return None
        failure = JudgedFailure(result, library, elsewhere, repeats)
        if fault := self._verdict(OF_THE_MACHINE, failure):
            return fault
        self._record.fail(result)
        return self._verdict(BY_COMPARISON, failure)

    def _verdict(self, rules: Sequence[Rule], failure: JudgedFailure) -> Fault | None:
        """Return the first fault that the rules find."""
        for rule in rules:
            if rule.when(self, failure) and (fault := rule.verdict(self, failure)):
                log.info("worker at fault", rule=rule.name, job=failure.result.job_id)
                return fault
        return None

    @property
    def _fault_cause(self) -> Cause:
        return Cause.DEVICE_LOST if self._device else Cause.INFRA

    def _never_succeeded(self, failure: JudgedFailure) -> Fault | None:
        elsewhere = failure.elsewhere()
        if not self._record.is_in_doubt(elsewhere):
            return None
        self._record.doubted += 1
        cause, text = (
            self._fault_cause,
            "nothing has succeeded here yet, and others succeed elsewhere",
        )
        if not elsewhere.succeeds:
            cause = failure.result.cause or Cause.INFRA
            text = f"nothing has succeeded here yet, the latest failed with {cause.value}, and"
            text += " whether others succeed is not known"
        return Fault(cause, text, is_unfit=self._record.doubted >= IN_A_ROW)

    def _fails_here_alone(self, failure: JudgedFailure) -> Fault | None:
        count = self._record.in_a_row
        if not self._succeeds(failure.elsewhere, NEWS_S if count == IN_A_ROW else 0.0):
            return None
        text = f"{count} different jobs failed here, and others succeed elsewhere"
        return Fault(self._fault_cause, text)

    def _fails_again(self, failure: JudgedFailure) -> Fault | None:
        is_due = self._record.charged + 1 >= self._record.repeat_at or failure.is_final
        if is_due and failure.repeats() is False:
            return Fault(self._fault_cause, _FAILS_AGAIN)
        self._record.charge(repeated=is_due)
        return None

    @staticmethod
    def _succeeds(elsewhere: Callable[[], Elsewhere], wait_s: float) -> bool:
        deadline = time.monotonic() + wait_s
        while (found := elsewhere().succeeds) is None and time.monotonic() < deadline:
            time.sleep(wait_s / 20)
        return bool(found)

    def of_error(self, error: BaseException, library: Library) -> Fault | None:
        """Why an error that the library raised is the machine's fault; None if it is not."""
        return machine_error(error) or self.examine(library)

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
            if self.fault is None and not self._record.has_succeeded:
                news = elsewhere()
                self.fault = fault if self._record.is_in_doubt(news) and not news.succeeds else None
            fault = self.fault or fault
        if self.fault is None:
            self._examined = True
            log.warning("worker back")

    def _sleep(self, pause_s: float) -> None:
        until = time.monotonic() + pause_s
        while (left_s := until - time.monotonic()) > 0 and not self._ending():
            time.sleep(min(left_s, _TICK_S))


def _lost(failure: JudgedFailure) -> Fault:
    return Fault(Cause.DEVICE_LOST, tail(failure.result.output_tail) or "the device was lost")


#: Rules that look at the machine alone. What is known need not be asked of a device that may not
#: answer.
OF_THE_MACHINE = (
    Rule(
        "no space left",
        lambda _, failure: failure.says_no_space,
        lambda health, _: lack_of_room(health._folders),
    ),
    Rule(
        "device lost",
        lambda _, failure: failure.result.cause is Cause.DEVICE_LOST,
        lambda _, failure: _lost(failure),
    ),
    Rule("examination", lambda *_: True, lambda health, failure: health.examine(failure.library)),
)
#: Rules that compare with other jobs and workers, and with what the device did before
BY_COMPARISON = (
    Rule(
        "never succeeded",
        lambda health, _: not health._record.has_succeeded,
        Health._never_succeeded,
    ),
    Rule(
        "fails here alone",
        lambda health, _: health._record.in_a_row >= IN_A_ROW,
        Health._fails_here_alone,
    ),
    Rule("fails again", lambda *_: True, Health._fails_again),
)
