"""Moves members' reports to the results of all workers: checked, and under the names of those whose
streams they were in."""

from __future__ import annotations

import hashlib
import re
import time
from collections.abc import Collection, Iterator, Sequence

import structlog
from pydantic import ValidationError

from tuna.artifacts.store import Artifacts
from tuna.errors import StorageFull
from tuna.libraries.items import MOST_TRIALS, StepResult
from tuna.membership.dealer import Pace
from tuna.membership.dealt import Dealt, DealtChunks
from tuna.membership.inbox import Inbox, RawReport
from tuna.membership.members import Member
from tuna.membership.relay import place_of_member
from tuna.queue.messages import Report, ReportKind
from tuna.vocabulary import Cause

log = structlog.get_logger(__name__)

#: Artifacts that are taken in of one member at a time: as many, and no more bytes, but one.
_READ_ARTIFACTS, _READ_ARTIFACT_BYTES = 64, 8 << 20
#: Bytes of one result, at most.
_RESULT_BYTES = 256 << 10
#: So much is read of one member, in bytes of reports each second: it takes some 5 % of a
#: coordinator's time. What a report costs however small it is; how much cheaper artifacts are; how
#: long a member may save up what it does not use.
_COST_PER_S, _ENTRY_COST, _ARTIFACTS_CHEAPER, _SAVED_S = 4 << 20, 8 << 10, 16, 1.0
_CHUNK = re.compile(r"[0-9a-f]{32}", re.ASCII)
_DIGEST = re.compile(r"[0-9a-f]{64}", re.ASCII)
_PROCESS = re.compile(r":([0-9]{1,10})\Z", re.ASCII)
_REASON_CHARS = 2000


class Collector:
    """Collects the reports of one database's members."""

    def __init__(self, inbox: Inbox, dealt: DealtChunks, artifacts: Artifacts, pace: Pace) -> None:
        """`artifacts`: a store whose `put` does not wait for space."""
        self._inbox = inbox
        self._dealt = dealt
        self._artifacts = artifacts
        self._pace = pace
        # chunk -> artifacts that it needs, or that were taken in
        self._taken: dict[str, set[str]] = {}
        self._next_at: dict[str, float] = {}  # when a member has used up what was read of it

    def collect(self, members: Sequence[Member]) -> int:
        """Move what there is, a bounded part of each member's; returns the number of reports that
        were moved."""
        now = time.monotonic()
        turn = [member for member in members if self._next_at.get(member.name, now) <= now]
        found = self._inbox.reports(turn) if turn else {}
        return sum(
            self._collect(member, found[member.name]) for member in turn if member.name in found
        )

    def forget(self, but: Collection[str]) -> None:
        """Forget all chunks but these."""
        self._taken = {chunk: digests for chunk, digests in self._taken.items() if chunk in but}

    def _collect(self, member: Member, entries: Sequence[RawReport]) -> int:
        moved, cost = 0, 0
        for entry in entries:
            cost += _ENTRY_COST + len(entry.text or b"")
            try:
                report = _read(entry)
                record = self._dealt.of_member(report.chunk, member.name)
                if record is not None:
                    _check_size(report, record, entry)
            except _BadReport as bad:
                self._inbox.drop_report(member.name, entry, str(bad))
                continue
            if record is not None:
                checked, read_bytes = self._take_in(member, report, record)
                cost += read_bytes // _ARTIFACTS_CHEAPER
                if checked is None:
                    break
                report = checked
            moved += self._move(member, entry, report)
        now = time.monotonic()
        self._next_at[member.name] = (
            max(now - _SAVED_S, self._next_at.get(member.name, 0.0)) + cost / _COST_PER_S
        )
        return moved

    def _move(self, member: Member, entry: RawReport, report: Report) -> bool:
        checked = _as_of(member, report)
        text, count = checked.to_json(), len(checked.results)
        outcome = self._dealt.move(
            member.name, report.chunk, entry.id, report.kind.value, text, count
        )
        if outcome.what:
            self._inbox.blame(member.name, f"reports: {outcome.what}")
        if outcome.moved and report.kind is ReportKind.FINISHED:
            self._pace.finish(member.name)
        elif outcome.moved and report.kind in (ReportKind.RETURNED, ReportKind.LOST):
            self._pace.fail(member.name)
        return outcome.moved

    def _take_in(self, member: Member, report: Report, record: Dealt) -> tuple[Report | None, int]:
        """The report with failures instead of results whose artifacts are not there, and bytes
        read; the others are now in the store, signed. None: there are more than fit into one turn,
        or into the store; what was read need not be again."""
        taken = self._taken.setdefault(report.chunk, set(record.inputs))
        named = sorted({digest for result in report.results for digest in _named(result)} - taken)
        good = [digest for digest in named if _DIGEST.fullmatch(digest)]
        missing = set(named) - set(good)
        some = good[:_READ_ARTIFACTS]
        found = (
            self._inbox.artifacts(member.name, report.chunk, some, _READ_ARTIFACT_BYTES)
            if some
            else []
        )
        read_bytes = 0
        for digest, data in zip(some, found, strict=False):  # as many as were read
            if data is None or hashlib.sha256(data).hexdigest() != digest:
                missing.add(digest)
                continue
            try:
                self._artifacts.put(data)
            except StorageFull as error:  # the member waits for the space, as own workers do
                log.warning("artifacts of a member wait", worker=member.name, why=str(error))
                return None, read_bytes
            taken.add(digest)
            read_bytes += len(data)
        if len(found) < len(good):
            return None, read_bytes
        if not missing:
            return report, read_bytes
        log.warning(
            "artifacts of a member are missing or damaged", worker=member.name, number=len(missing)
        )
        results = tuple(
            _without_artifact(one) if missing & set(_named(one)) else one for one in report.results
        )
        return report.model_copy(update={"results": results}), read_bytes


class _BadReport(ValueError):
    """What no working member writes, in words of this process."""


def _read(entry: RawReport) -> Report:
    """Parse a report; raises _BadReport."""
    if entry.text is None:
        raise _BadReport("not one field r")
    try:
        report = Report.model_validate_json(entry.text)
    except ValidationError:
        raise _BadReport("unreadable") from None
    if not _CHUNK.fullmatch(report.chunk):
        raise _BadReport("no chunk")
    if report.results and report.kind in (ReportKind.STARTED, ReportKind.LOST):
        raise _BadReport(f"results in a report of the kind {report.kind.value}")
    return report


def _check_size(report: Report, record: Dealt, entry: RawReport) -> None:
    """Raise _BadReport for more than a chunk's items can give."""
    if len(report.results) > record.items:
        raise _BadReport("more results than items")
    if sum(len(result.trials) for result in report.results) > MOST_TRIALS:
        raise _BadReport("too many trials")
    if len(entry.text or b"") > _RESULT_BYTES * (record.items + 1):
        raise _BadReport("too large")


def _as_of(member: Member, report: Report) -> Report:
    """The report as this member's own, whatever name it gives."""
    process = _PROCESS.search(report.worker)
    facts = {
        "member": member.name,
        "worker": f"{member.name}:{process[1] if process else 0}"[:255],
        "place": place_of_member(member.name, report.place),
        "reason": report.reason[:_REASON_CHARS],
    }
    return report.model_copy(update=facts)


def _named(result: StepResult) -> Iterator[str]:
    """Digests of the artifacts that a result brings or refers to."""
    yield from (trial.artifact for trial in result.trials if trial.artifact)
    yield from (code.artifact for code in result.kernels or ())
    if result.workload:
        yield result.workload


def _without_artifact(result: StepResult) -> StepResult:
    text = "The worker did not put an artifact that its result names, or other bytes than it says."
    return StepResult(
        job_id=result.job_id,
        attempt=result.attempt,
        step=result.step,
        ok=False,
        cause=Cause.INFRA,
        output_tail=text,
        started_at=result.started_at,
        ended_at=result.ended_at,
    )
