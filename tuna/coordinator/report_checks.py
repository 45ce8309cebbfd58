"""Reports that cannot count as they are: results are checked against their jobs before anything is
written, and what cannot be drained at all becomes a dead letter, in SQL with its bytes and the
reason.

The checks hold for every worker, own or remote, however its report came here: what a worker cannot
know is cut, or fails the result. There are two kinds of dead letters. A report about a session
whose library is not installed here waits for a coordinator that has it. A report that is malformed,
or that the database refused, is kept for a person to look at.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from datetime import datetime
from typing import Any

import sqlalchemy as sa
import structlog
from pydantic import ValidationError

from tuna.common.messages import first_fault
from tuna.coordinator.find_db_writer import fits
from tuna.db.bulk import rows_among
from tuna.db.models import DeadLetter, Job
from tuna.db.types import utc_now
from tuna.jobs.states import AttemptedJob
from tuna.libraries import items
from tuna.libraries.base import Library
from tuna.libraries.items import StepResult
from tuna.libraries.options import JobOptions, read
from tuna.libraries.registry import find_library
from tuna.libraries.results import is_time
from tuna.queue.messages import Report
from tuna.vocabulary import Cause

log = structlog.get_logger(__name__)

#: Maximum difference in seconds of coordinators' clocks: one leases a chunk, another drains its
#: results
_SKEW_S = 1.0
#: Characters of a device's name that are kept where the name of a remote worker follows
_DEVICE_CHARS = 120


@dataclass
class _Lease:
    """The lease of a chunk."""

    began_s: float  #: seconds since the epoch at which the lease began
    lasted_s: float
    left_s: float  #: seconds of the lease that no result has used


class ResultChecks:
    """Checks the results of one batch."""

    def __init__(
        self,
        connection: sa.Connection,
        libraries: Mapping[int, Library | str],
        results: Iterable[StepResult],
        now: datetime,
    ) -> None:
        """`libraries`: by session; the name of one that is not installed here."""
        self._now_s = now.timestamp()
        self._max_trials = _trials_asked(connection, libraries, results)
        self._leases: dict[str, _Lease] = {}  # by chunk

    def checked(self, job: AttemptedJob, result: StepResult, report: Report) -> StepResult:
        """Return the result as it may count for its job."""
        most = self._max_trials.get(job.id)
        if most is not None and len(result.trials) > most:
            result = _too_many(result, most)
        return _of_remote(self._within_lease(job, sane(result), report.chunk), report.remote)

    def _within_lease(self, job: AttemptedJob, result: StepResult, chunk: str) -> StepResult:
        """The result with times between the chunk's lease and now, of which the items of a report
        share one."""
        if chunk not in self._leases:
            leased_since = job.leased_since
            leased_s = leased_since.timestamp() if leased_since else self._now_s
            lasted_s = max(0.0, self._now_s - leased_s) + _SKEW_S
            self._leases[chunk] = _Lease(leased_s, lasted_s, lasted_s)
        lease = self._leases[chunk]
        took_s, busy_s = result.ended_at - result.started_at, result.busy_s
        is_within = lease.began_s - _SKEW_S <= result.started_at <= result.ended_at <= self._now_s
        if is_within and (busy_s or took_s) <= lease.left_s:
            lease.left_s -= busy_s or took_s
            return result
        took_s = min(max(0.0, took_s), lease.lasted_s if busy_s else lease.left_s)
        busy_s = min(busy_s, lease.left_s)
        lease.left_s -= busy_s or took_s
        if not result.started_at and not result.ended_at:  # not known
            return result.model_copy(update={"busy_s": busy_s})
        ended_s = max(min(result.ended_at, self._now_s), lease.began_s - _SKEW_S + took_s)
        times = {"started_at": ended_s - took_s, "ended_at": ended_s, "busy_s": busy_s}
        return result.model_copy(update=times)


def _trials_asked(
    connection: sa.Connection, libraries: Mapping[int, Library | str], results: Iterable[StepResult]
) -> dict[int, int]:
    """Return how many trials the jobs asked for of which a result has several."""
    several = {result.job_id for result in results if len(result.trials) > 1}
    query = sa.select(Job.id, Job.session_id, Job.options)
    return {
        job_id: _asked(library, options)
        for job_id, session_id, options in rows_among(connection, query, Job.id, several)
        if isinstance(library := libraries.get(session_id), Library)
    }


def _asked(library: Library, options: Mapping[str, Any]) -> int:
    try:
        return read(library.options, options).max_trials
    except Exception as error:  # a plug-in's own code
        log.error(
            "library failed to say how many trials a job asks for",
            fault=f"{type(error).__name__}: {error}",
        )
        return JobOptions().max_trials


def _too_many(result: StepResult, most: int) -> StepResult:
    text = f"the result has {len(result.trials)} trials, and its job asked for {most} at most"
    return result.failed(Cause.INFRA, text, bare=True)


def _of_remote(result: StepResult, worker: str) -> StepResult:
    """The result with a device of the remote worker's own: what it says of that changes no device
    that others have."""
    if not worker or result.device is None:
        return result
    name = f"{result.device.name[:_DEVICE_CHARS]} of {worker}"[:255]
    return result.model_copy(update={"device": result.device.model_copy(update={"name": name})})


def sane(result: StepResult) -> StepResult:
    """The result with every impossible time turned into a failed trial."""
    if all(trial.time_ms is None or _possible(trial) for trial in result.trials):
        return result
    trials = tuple(
        trial if trial.time_ms is None or _possible(trial) else _failed(trial)
        for trial in result.trials
    )
    good = any(trial.cause is None for trial in trials)
    update: dict[str, Any] = {"trials": trials, "ok": result.ok and good}
    if result.ok and not good:
        update |= {"cause": Cause.RUN_ERROR, "output_tail": "no candidate has a possible time"}
    return result.model_copy(update=update)


def _possible(trial: items.Trial) -> bool:
    bounds = (time for time in (trial.low_ms, trial.high_ms) if time is not None)
    return all(map(is_time, (trial.time_ms, *trial.times_ms, *bounds)))


def _failed(trial: items.Trial) -> items.Trial:
    facts = {"time_ms": None, "times_ms": (), "low_ms": None, "high_ms": None}
    text = f"impossible time: {trial.time_ms} ms"
    return trial.model_copy(update={**facts, "cause": Cause.RUN_ERROR, "output_tail": text})


#: Bytes of a malformed report that are kept, and maximum of such reports, so that workers
#: cannot fill the database
KEPT_BYTES, KEPT = 1 << 20, 1000


@dataclass(frozen=True)
class Letter:
    """A report that could not be drained; `library` is the one that is missing here, empty if that
    is not the reason."""

    fault: str
    body: bytes
    library: str = ""
    session_id: int | None = None


def keep_letters(connection: sa.Connection, letters: Iterable[Letter]) -> None:
    """Store the letters; of those for a person only the first ones, each up to a limit."""
    for letter in letters:
        if not letter.library and _of_no_library(connection) >= KEPT:
            continue
        body = letter.body if letter.library else letter.body[:KEPT_BYTES]
        connection.execute(
            sa.insert(DeadLetter).values(
                library=letter.library,
                session_id=letter.session_id,
                fault=letter.fault,
                body=body,
                created_at=utc_now(),
            )
        )


def fitting_parts(connection: sa.Connection, report: Report) -> list[Report]:
    """The report in parts that the database takes: of one result each, a failure in the place of
    one that is too long."""
    size_bytes = len(report.to_json().encode())
    if fits(connection, size_bytes):
        return [report]
    if len(report.results) > 1:
        return [
            part for one in report.parts() if one.results for part in fitting_parts(connection, one)
        ]
    text = (
        f"The result has {size_bytes} bytes, more than the database takes: set its"
        " max_allowed_packet to 256M."
    )
    log.error("result too long for the database", worker=report.worker, size_bytes=size_bytes)
    return [report.failed(text)]


def letters_for_installed_libraries(
    connection: sa.Connection, limit: int
) -> tuple[dict[int, Report], dict[int, str]]:
    """Return up to `limit` reports, by their letter's id, that waited for a library which is
    installed here, and why others cannot be read: they may be of another version of Tuna."""
    names = connection.execute(
        sa.select(DeadLetter.library).where(DeadLetter.library != "").distinct()
    ).scalars()
    here = [name for name in names if find_library(name) is not None]
    if not here:
        return {}, {}
    query = (
        sa.select(DeadLetter.id, DeadLetter.body)
        .where(DeadLetter.library.in_(here))
        .order_by(DeadLetter.id)
    )
    reports: dict[int, Report] = {}
    faults: dict[int, str] = {}
    for row in connection.execute(query.limit(limit)):
        try:
            reports[row.id] = Report.model_validate_json(row.body)
        except ValidationError as error:
            faults[row.id] = first_fault(error.errors())
    return reports, faults


def settle_letters(
    connection: sa.Connection, drained: Iterable[int], faults: Mapping[int, str]
) -> None:
    """Delete letters whose content was drained; those that cannot be read are for a person from now
    on, and their jobs are repeated."""
    connection.execute(sa.delete(DeadLetter).where(DeadLetter.id.in_(list(drained))))
    for letter_id, fault in faults.items():
        log.error("dead letter cannot be read", letter=letter_id, fault=fault)
        values = {"library": "", "fault": fault}
        connection.execute(sa.update(DeadLetter).where(DeadLetter.id == letter_id).values(values))


def _of_no_library(connection: sa.Connection) -> int:
    query = sa.select(sa.func.count()).select_from(DeadLetter).where(DeadLetter.library == "")
    return connection.execute(query).scalar_one()
