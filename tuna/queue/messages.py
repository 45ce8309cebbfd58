"""Messages of the queues and of the result stream: the JSON forms of a chunk and of a report about
it."""

from __future__ import annotations

from enum import Enum
from typing import Annotated, Any

from pydantic import AfterValidator, BaseModel, ConfigDict, Field

from tuna.common.messages import one_line
from tuna.libraries.items import WIRE_VERSION, StepResult, WorkItem
from tuna.vocabulary import Cause

#: Maximum of bytes of a report, above which it is not parsed; reports of whole chunks have some
#: hundred kilobytes
MAX_REPORT_BYTES = 64 << 20
#: Maximum of results in one report
_MAX_RESULTS = 1 << 16
#: Maximum of characters of each text about a chunk in Celery's events
_SHOWN_CHARS = 300


def _understood(version: int) -> int:
    if version not in (0, WIRE_VERSION):
        raise ValueError(f"it has version {version}, and this is version {WIRE_VERSION}")
    return WIRE_VERSION


class _Message(BaseModel):
    # NaN is serialised as NaN: the drain turns it into a failed trial, where null would make the
    # whole report unreadable.
    model_config = ConfigDict(extra="forbid", frozen=True, ser_json_inf_nan="constants")
    #: version of the message's format; validated by default, so that it is never left out as a
    #: default
    version: Annotated[int, Field(validate_default=True), AfterValidator(_understood)] = 0


class Chunk(_Message):
    """One message of a queue: work items of one step that share one lease."""

    id: str
    namespace: str  #: namespace in Redis, which identifies the database
    library: str
    step: str
    environment: str  #: `machine_key` of the session's environment; empty for steps on any CPU
    toolchain: str
    items: tuple[WorkItem, ...]


class ReportKind(str, Enum):
    """Kinds of reports about a chunk."""

    STARTED = "started"  #: the worker took the lease
    RESULTS = "results"  #: some items are done
    FINISHED = "finished"  #: all items are done (with the last results) and the lease is released
    RETURNED = "returned"  #: the worker returns the items without result, uncharged
    ABANDONED = "abandoned"  #: the lease was lost; what the worker had stored for the chunk


class Report(_Message):
    """One entry of the result stream."""

    kind: ReportKind
    chunk: str
    worker: Annotated[str, Field(max_length=255)]
    #: device or Celery node of the worker, which may be at fault for a failure
    place: Annotated[str, Field(max_length=255)] = ""
    #: name of the remote worker, set by the gateway; empty: the worker is not remote
    remote: Annotated[str, Field(max_length=255)] = ""
    results: Annotated[tuple[StepResult, ...], Field(max_length=_MAX_RESULTS)] = ()
    reason: str = ""  #: reason for which a chunk was returned
    #: ids of the jobs of an abandoned chunk
    jobs: tuple[Annotated[int, Field(ge=0, lt=2**63)], ...] = ()
    #: digests of what was stored for an abandoned chunk, with results or without
    artifacts: tuple[Annotated[str, Field(max_length=64)], ...] = ()

    def to_json(self) -> str:
        """Its wire format."""
        return self.model_dump_json(exclude_defaults=True)

    def parts(self) -> list[Report]:
        """The report split into reports of one result each."""
        if len(self.results) < 2:
            return [self]
        single = [
            self.model_copy(update={"kind": ReportKind.RESULTS, "results": (one,)})
            for one in self.results
        ]
        return [*single, self.model_copy(update={"results": ()})]

    def failed(self, text: str) -> Report:
        """The report with failures, for the reason `text`, instead of its results."""
        facts = {"ok": False, "cause": Cause.INFRA, "output_tail": text}
        results = (
            StepResult(job_id=r.job_id, attempt=r.attempt, step=r.step, **facts)
            for r in self.results
        )
        return self.model_copy(update={"results": tuple(results)})


def title(chunk: Chunk) -> str:
    """The name of a chunk's task in Celery's events, which Flower shows: inert, as names come from
    plug-ins."""
    return one_line(
        f"{chunk.library} {chunk.step} of session {chunk.items[0].session_id}", _SHOWN_CHARS
    )


def summary(chunk: Chunk) -> str:
    """A chunk's first item in words, and how many more there are: inert, as labels come from
    files."""
    first, more = chunk.items[0], len(chunk.items) - 1
    return one_line(f"{first.solver} on {first.layer.label}", _SHOWN_CHARS) + (
        f" and {more} more" if more else ""
    )


def task_message(chunk: Chunk) -> dict[str, Any]:
    """The chunk as Celery's JSON serialiser takes it; items as text, so that they are encoded
    once."""
    return {"chunk": chunk.model_dump_json(exclude_defaults=True)}


def log_fields(chunk: Chunk) -> dict[str, Any]:
    """Return the fields that log lines about a chunk carry."""
    ids = [item.job_id for item in chunk.items]
    jobs = {"job": ids[0]} if len(ids) == 1 else {"jobs": ids}
    return (
        {"session": chunk.items[0].session_id, "step": chunk.step, "chunk": chunk.id, **jobs}
        if ids
        else {}
    )
