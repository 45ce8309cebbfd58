"""The children of a `CandidateLibrary`: how they are started and called, and the one that builds;
those that measure are in `measuring_processes`.

What a child says may be a candidate's word, so answers are checked where they arrive; a wrong one
is a crash of that child (`sandbox.processes.Child.call`), never an exception in the worker.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any, Literal

from pydantic import BaseModel, ConfigDict, Field, TypeAdapter, ValidationError, model_validator

from tuna.common.messages import first_fault
from tuna.libraries.context import RunContext
from tuna.libraries.kernels import DeviceLost
from tuna.libraries.measurement import Call, DeviceGone
from tuna.libraries.results import MAX_PARTS
from tuna.sandbox.box import Box
from tuna.sandbox.processes import Child, ChildFailed, child_env

#: Folders that the children may write to, emptied after each item
BUILD, MEASURE = "build", "measure"


@dataclass(frozen=True)
class ChildKind:
    """The start of children of one kind."""

    module: str
    used: str  #: builder or loader that the child is started for
    folder: str  #: folder that it may write to: BUILD or MEASURE
    #: function that returns the environment variables besides the common ones, for a number of
    #: threads
    variables: Callable[[int], Mapping[str, str]]
    memory_bytes: int
    start_timeout_s: float  #: seconds for its imports and what comes before the first candidate
    #: true if it measures over the network instead of on a device of this machine
    remote: bool = False

    def new(self, context: RunContext, threads: int) -> Child:
        """A child that may use so many threads."""
        visible = context.device.variables if context.device else {}
        writable = child_folder(context, self.folder)
        gpus = not self.remote and context.device is not None and not context.device.cores_only
        readable = (_lasting_folder(context),)
        return Child(
            self.module,
            env=child_env({**self.variables(threads), **visible}),
            memory_bytes=self.memory_bytes,
            cpus=context.cpus,
            cwd=writable,
            box=Box(writable=(writable,), readable=readable, gpus=gpus, network=self.remote),
            imports=[self.used.partition(":")[0]],
        )


def call_child(
    child: Child,
    context: RunContext,
    op: str,
    timeout_s: float,
    *,
    cpu_limit: bool = False,
    **arguments: Any,
) -> dict[str, Any]:
    """Call a child, and check its answer; raises ChildFault, DeviceGone."""
    request = {"op": op, **arguments}
    try:
        return child.call(
            request, timeout_s, context.cancelled, cpu_limit=cpu_limit, check=answer_to(request)
        )
    except ChildFailed as error:
        if error.ends == DeviceLost.ends and child.box is not None and child.box.gpus:
            raise DeviceGone(str(error)) from error
        raise


class CompileProcess:
    """The process that proposes and builds candidates, of one item after the other."""

    def __init__(self, kind: ChildKind) -> None:
        self._kind = kind
        self.child: Child | None = None
        self._body = ""  #: file of the config's body that it builds for; empty: none

    @property
    def alive(self) -> bool:
        """Whether it has started and not ended."""
        return self.child is not None and self.child.alive

    def caller(
        self, job: Mapping[str, Any], context: RunContext, *, one_body: bool, wide: bool = False
    ) -> Call:
        """Calls for a job, which take their turn with measurements on this machine.

        `one_body`: not in a process that has built for another body, or for a config without one.
        `wide`: builds start processes of their own, as many as the cores that they may use.
        """
        body = str(job.get("body", ""))
        if one_body and self._body != body:
            self.close()
        self._body = body
        child = self.child = self.child or self._kind.new(context, 1)

        def call(op: str, timeout_s: float, **arguments: Any) -> dict[str, Any]:
            # so that its imports too can borrow a core
            child.start(self._kind.start_timeout_s, context.cancelled)
            with context.build(timeout_s, child.pid, wide=wide):
                facts = {"builder": self._kind.used, "job": job, **arguments}
                return call_child(child, context, op, timeout_s, **facts)

        return call

    def close(self) -> None:
        """End it; the next call starts another."""
        if self.child is not None:
            self.child.close()
            self.child = None


class ArtifactLost(Exception):
    """An artifact, by its digest, is gone from the store or damaged."""


def artifact(digest: str, context: RunContext) -> bytes:
    """The bytes of an artifact; raises ArtifactLost."""
    try:
        return context.artifacts.get(digest)
    except KeyError:
        raise ArtifactLost(digest) from None


def stored(digest: str, context: RunContext) -> Path:
    """A file with an artifact that a config names, for the children; raises ArtifactLost."""
    path = context.scratch / f"{digest}.body"
    if not path.exists():
        path.write_bytes(artifact(digest, context))
    return path


def child_folder(context: RunContext, name: str) -> Path:
    """The folder that a child may write to; what is to be measured lies beside it, where it may
    only read."""
    folder = _lasting_folder(context) / name
    folder.mkdir(parents=True, exist_ok=True)
    return folder


def _lasting_folder(context: RunContext) -> Path:
    return context.lasting or context.scratch


#: Milliseconds that a clock can tell: at least a nanosecond, at most the largest
#: `measure_timeout_s`
_Ms = Annotated[float, Field(ge=1e-6, le=86_400e3, allow_inf_nan=False)]
_Share = Annotated[float, Field(ge=0, allow_inf_nan=False)]
_Part = Annotated[str, Field(max_length=255)]
_PartMs = Annotated[float, Field(ge=0, le=86_400e3, allow_inf_nan=False)]
_Seconds = Annotated[float, Field(ge=0, le=86_400 * 30, allow_inf_nan=False)]
#: GFLOPS of a device; 1e9, an exaflop per second, is more than any has
_Gflops = Annotated[float, Field(gt=0, le=1e9, allow_inf_nan=False)]
_Extent = Annotated[int, Field(ge=0, lt=2**40)]
_Name = Annotated[str, Field(max_length=32)]
_Params = Annotated[str, Field(max_length=1 << 20)]


class _Answer(BaseModel):
    model_config = ConfigDict(extra="forbid", strict=True)


class _Nothing(_Answer):
    pass


class _Probe(_Answer):
    """JSON form of `probe.Probe`."""

    gflops: _Gflops
    source: Literal["fma", "gemm", "own", "device"]
    copy_s: Annotated[float, Field(gt=0, le=60, allow_inf_nan=False)]


class _Timing(_Answer):
    """JSON form of `repeats.Timing`."""

    times_ms: Annotated[list[_Ms], Field(min_length=1, max_length=1_000_000)]
    time_ms: _Ms
    low_ms: _Ms
    high_ms: _Ms
    clock: Literal["wall", "cpu", "own"]
    noisy: bool

    @model_validator(mode="after")
    def _in_order(self) -> _Timing:
        least, most = min(self.times_ms), max(self.times_ms)
        if not least <= self.low_ms <= self.time_ms <= self.high_ms <= most:
            raise ValueError("median, interval and times are not in order")
        return self


class _Measured(_Answer):
    error: _Share | None
    tolerance: _Share
    report: Annotated[str, Field(max_length=1000)] = ""
    timing: _Timing | None
    ended_early: bool = False
    parts: Annotated[dict[_Part, _PartMs], Field(max_length=MAX_PARTS)] = {}

    @model_validator(mode="after")
    def _is_right(self) -> _Measured:
        if self.timing is not None and (self.error is None or self.error > self.tolerance):
            raise ValueError("a wrong answer was timed")
        return self


class _Inputs(_Answer):
    arrays: list[Annotated[list[list[_Extent] | _Name], Field(min_length=2, max_length=2)]]


class _Timings(_Answer):
    timings: list[_Timing]


class _Proposed(_Answer):
    params: Annotated[list[_Params], Field(max_length=100_000)]


class _BuildKeys(_Answer):
    keys: list[Annotated[str, Field(max_length=1024)]]
    fault: str


class _Described(_Answer):
    bytes: Annotated[int, Field(ge=0)]


class _Built(_Answer):
    seconds: _Seconds


_ANSWERS: Mapping[str, TypeAdapter[Any]] = {
    "prepare": TypeAdapter(_Nothing),
    "probe": TypeAdapter(_Probe | _Nothing),
    "measure": TypeAdapter(_Measured),
    "save_inputs": TypeAdapter(_Inputs),
    "again": TypeAdapter(_Timings),
    "propose": TypeAdapter(_Proposed),
    "search": TypeAdapter(_Proposed),
    "workload": TypeAdapter(_Described),
    "build_keys": TypeAdapter(_BuildKeys),
    "build": TypeAdapter(_Built),
}


def answer_to(request: Mapping[str, Any]) -> Callable[[Any], dict[str, Any]]:
    """The check of an answer to a request: it returns the answer, or raises ValueError."""
    kind = _ANSWERS[request["op"]]

    def check(answer: Any) -> dict[str, Any]:
        try:
            found: _Answer = kind.validate_python(answer)
        except ValidationError as error:
            raise ValueError(first_fault(error.errors())) from None
        if isinstance(found, _Timings) and len(found.timings) != len(request["jobs"]):
            raise ValueError("not one timing for each candidate")
        if isinstance(found, _BuildKeys) and len(found.keys) != len(request["params"]):
            raise ValueError("not one build key for each candidate")
        return found.model_dump()

    return check
