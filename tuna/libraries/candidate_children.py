"""The children of a `CandidateLibrary`: one that builds, and those that measure.

Candidates are foreign code: a process in which one has run cannot be trusted any more. So the
candidates of an item run in a process that ends with the item, and facts that a worker keeps beyond
it, such as the device's peak, come from another process.

What a child says may be a candidate's word, so answers are checked where they arrive; a wrong one
is a crash of that child (`sandbox.processes.Child.call`), never an exception in the worker.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Annotated, Any, ClassVar, Literal

from pydantic import BaseModel, ConfigDict, Field, TypeAdapter, model_validator

from tuna.libraries.base import Library
from tuna.libraries.context import DeviceHandle, RunContext
from tuna.libraries.items import MOST_PARTS
from tuna.libraries.kernels import DeviceLost
from tuna.libraries.measurement import Call, Calls, DeviceGone, build_fault
from tuna.sandbox.box import Box
from tuna.sandbox.processes import Child, ChildFailed, ChildFault, child_env

#: Folders that the children may write to, emptied after each item.
BUILD, MEASURE = "build", "measure"
#: Time that a device has to answer a child that is started for it.
_PROBE_S = 50.0


class CandidateChildren(Library):
    """Starts, calls and ends the children."""

    builder: ClassVar[str]  #: the `Builder`, such as "my_package.kernel:MyBuilder"
    loader: ClassVar[str]  #: the `Loader`
    measuring: ClassVar[str] = "tuna.libraries.measuring"  #: module of the child that measures
    memory_bytes: ClassVar[int] = 8 << 30  #: limit of a child
    #: for a child's imports and what comes before the first candidate
    start_timeout_s: ClassVar[float] = 180.0
    #: Whether a process that imported the loader may fork: then fresh processes are cheap. Not if
    #: the import or `peak_gflops` opens a device.
    forkable: ClassVar[bool] = False
    #: Whether candidates are code of the device alone, which cannot change the process that
    #: measures them: then one process measures those of all items, and answers probes.
    device_code_only: ClassVar[bool] = False
    #: Whether the builder runs code that a config's body has: then a process that builds for one
    #: body builds for no other, and for no config without one.
    runs_bodies: ClassVar[bool] = False

    def __init__(self) -> None:
        self._compiler: Child | None = None
        self._compiled_body = ""  #: file of the config's body that it builds for
        self._clean: Child | None = None
        self._evaluator: Child | None = None
        self._fork = 1  #: number of the fork in which the item's candidates run
        self._tainted = False  #: whether a candidate has run in the evaluator, or in that fork

    def child_variables(self, threads: int) -> Mapping[str, str]:
        """Environment variables of the children, besides the common ones; `threads` is how many
        they may use."""
        return {name: str(threads) for name in ("OMP_NUM_THREADS", "OPENBLAS_NUM_THREADS")}

    def warm_up(self, context: RunContext) -> None:
        """Start the children that measure on cores, which import while the first candidates are
        built.

        Those beside a device that has a driver are left to the first chunk, and so are those that
        build: at the start all would import at once, on the cores that the first chunk needs.
        """
        with contextlib.suppress(ChildFault):  # the first chunk that needs them reports it
            if context.device is not None and context.device.cores_only:
                self._clean_child(context).start()
                if not self.forkable:
                    self._loader_child(context).start()

    def close(self) -> None:
        """End the children."""
        for child in (self._compiler, self._evaluator, self._clean):
            if child is not None:
                child.close()
        self._compiler = self._evaluator = self._clean = None

    def probe(self, device: DeviceHandle) -> str:
        """Whether a fresh child can load the library and ask the device for its peak; cores are not
        asked."""
        if device.cores_only:
            return ""
        env = child_env({**self.child_variables(1), **device.variables})
        child = Child(self.measuring, env=env, box=Box(gpus=True))
        try:
            request = {"op": "probe", "loader": self.loader}
            child.call(request, _PROBE_S, check=answer_to(request))
        except ChildFault as error:
            return str(build_fault(error)["output_tail"]).splitlines()[-1]
        finally:
            child.close()
        return ""

    def _builder_child(self, context: RunContext, body: str) -> Child:
        """The compile child; `body`: the file with the body of the job's config, if it has one."""
        if self.runs_bodies and self._compiler is not None and self._compiled_body != body:
            self._compiler.close()
            self._compiler = None
        self._compiled_body = body
        self._compiler = self._compiler or self._child(
            "tuna.libraries.building", BUILD, context, 1, self.builder
        )
        return self._compiler

    def _builder_caller(self, job: dict[str, Any], context: RunContext) -> Call:
        """`call` of the compile child, which takes its turn with measurements on this machine."""
        child = self._builder_child(context, str(job.get("body", "")))
        plain = self._caller(child, context, builder=self.builder, job=job)

        def call(op: str, timeout_s: float, **arguments: Any) -> dict[str, Any]:
            # so that its imports too can borrow a core
            child.start(self.start_timeout_s, context.cancelled)
            with context.build(timeout_s, child.pid):
                return plain(op, timeout_s, **arguments)

        return call

    def _clean_child(self, context: RunContext) -> Child:
        """Has imported the loader, and no candidate runs in it: it answers probes and, if it is
        forkable, forks."""
        self._clean = self._clean or self._measuring_child(context)
        return self._clean

    def _loader_child(self, context: RunContext) -> Child:
        """The candidates of one item run in it, where the clean child is not forkable."""
        if self.device_code_only:
            return self._clean_child(context)
        self._evaluator = self._evaluator or self._measuring_child(context)
        return self._evaluator

    def _measuring_child(self, context: RunContext) -> Child:
        return self._child(self.measuring, MEASURE, context, len(context.cpus) or 1, self.loader)

    def _calls(self, context: RunContext, *, finals: bool) -> Calls:
        """Calls of the processes; `finals`: of a config, which are always in fresh ones."""
        clean = self._caller(self._clean_child(context), context, loader=self.loader)

        def forked(op: str, timeout_s: float, **arguments: Any) -> dict[str, Any]:
            self._tainted = True
            return clean(op, timeout_s, fork=self._fork, **arguments)

        def started(op: str, timeout_s: float, **arguments: Any) -> dict[str, Any]:
            self._tainted = True
            call = self._caller(self._loader_child(context), context, loader=self.loader)
            return call(op, timeout_s, **arguments)

        here = forked if self.forkable else started
        # code of the device leaves nothing behind in the process, whose start takes longer than
        # all of its finalists
        fresh = here if self.device_code_only and not finals else self._fresh(context)
        return Calls(clean, here, fresh)

    def _end_tainted(self, context: RunContext) -> None:
        """End the process in which the item's candidates ran: it could report wrong times for those
        of the next item."""
        if not self._tainted or self.device_code_only:
            return
        self._tainted = False
        if not self.forkable and self._evaluator is not None:
            self._evaluator.close()
        if self.forkable and self._clean is not None and self._clean.alive:
            self._fork += 1
            with contextlib.suppress(ChildFault):
                self._caller(self._clean, context, loader=self.loader)(
                    "prepare", self.start_timeout_s
                )

    def _fresh(self, context: RunContext) -> Call:
        """Calls of the eval child's functions, each in a process in which nothing was measured
        before."""

        def fork(op: str, timeout_s: float, **arguments: Any) -> dict[str, Any]:
            self._fork += 1
            call = self._caller(self._clean_child(context), context, loader=self.loader)
            call("prepare", self.start_timeout_s, fork=self._fork)
            return call(op, timeout_s, fork=self._fork, **arguments)

        def start(op: str, timeout_s: float, **arguments: Any) -> dict[str, Any]:
            child = self._measuring_child(context)
            call = self._caller(child, context, loader=self.loader)
            try:
                call("prepare", self.start_timeout_s)
                return call(op, timeout_s, **arguments)
            finally:
                child.close()

        return fork if self.forkable else start

    def _child(self, module: str, name: str, context: RunContext, threads: int, used: str) -> Child:
        """`used`: the builder or loader that it is started for."""
        visible = context.device.variables if context.device else {}
        writable = child_folder(context, name)
        gpus = context.device is not None and not context.device.cores_only
        return Child(
            module,
            env=child_env({**self.child_variables(threads), **visible}),
            memory_bytes=self.memory_bytes,
            cpus=context.cpus,
            cwd=writable,
            box=Box(writable=(writable,), readable=(_lasting_folder(context),), gpus=gpus),
            imports=[used.partition(":")[0]],
        )

    def _caller(self, child: Child, context: RunContext, **common: Any) -> Call:
        """`call(op, timeout_s, **arguments)`: every call of a child goes through here."""

        def call(
            op: str, timeout_s: float, *, cpu_limit: bool = False, **arguments: Any
        ) -> dict[str, Any]:
            request = {"op": op, **common, **arguments}
            check = answer_to(request)
            try:
                return child.call(
                    request, timeout_s, context.cancelled, cpu_limit=cpu_limit, check=check
                )
            except ChildFailed as error:
                if error.ends == DeviceLost.ends and child.box is not None and child.box.gpus:
                    raise DeviceGone(str(error)) from error
                raise

        return call


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
#: `measure_timeout_s`.
_Ms = Annotated[float, Field(ge=1e-6, le=86_400e3, allow_inf_nan=False)]
_Share = Annotated[float, Field(ge=0, allow_inf_nan=False)]
_Part = Annotated[str, Field(max_length=255)]
_PartMs = Annotated[float, Field(ge=0, le=86_400e3, allow_inf_nan=False)]
_Seconds = Annotated[float, Field(ge=0, le=86_400 * 30, allow_inf_nan=False)]
#: More than any device has: 1e9 is an exaflop per second.
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
    parts: Annotated[dict[_Part, _PartMs], Field(max_length=MOST_PARTS)] = {}

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
        found: _Answer = kind.validate_python(answer)
        if isinstance(found, _Timings) and len(found.timings) != len(request["jobs"]):
            raise ValueError("not one timing for each candidate")
        if isinstance(found, _BuildKeys) and len(found.keys) != len(request["params"]):
            raise ValueError("not one build key for each candidate")
        return found.model_dump()

    return check
