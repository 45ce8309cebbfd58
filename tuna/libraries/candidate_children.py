"""The children of a `CandidateLibrary`: one that builds, and those that measure.

Candidates are foreign code: a process in which one has run cannot be trusted any more. So the
candidates of an item run in a process that ends with the item, and facts that a worker keeps beyond
it, such as the device's peak, come from another process.
"""

from __future__ import annotations

import contextlib
from collections.abc import Mapping
from pathlib import Path
from typing import Any, ClassVar

from tuna.libraries.base import Library
from tuna.libraries.child_answers import answer_to
from tuna.libraries.context import RunContext
from tuna.libraries.kernels import DeviceLost
from tuna.libraries.measurement import CHILD_FAULTS, Call, Calls, DeviceGone
from tuna.sandbox.box import Box
from tuna.sandbox.processes import Child, ChildFailed, child_env

#: Folders that the children may write to, emptied after each item.
BUILD, MEASURE = "build", "measure"


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

    def __init__(self) -> None:
        self._compiler: Child | None = None
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
        with contextlib.suppress(*CHILD_FAULTS):  # the first chunk that needs them reports it
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

    def _builder_child(self, context: RunContext) -> Child:
        self._compiler = self._compiler or self._child(
            "tuna.libraries.building", BUILD, context, 1, self.builder
        )
        return self._compiler

    def _builder_caller(self, job: dict[str, Any], context: RunContext) -> Call:
        """`call` of the compile child, which takes its turn with measurements on this machine."""
        child = self._builder_child(context)
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
        threads = len(context.cpus) or 1
        self._clean = self._clean or self._child(
            self.measuring, MEASURE, context, threads, self.loader
        )
        return self._clean

    def _loader_child(self, context: RunContext) -> Child:
        """The candidates of one item run in it, where the clean child is not forkable."""
        if self.device_code_only:
            return self._clean_child(context)
        threads = len(context.cpus) or 1
        self._evaluator = self._evaluator or self._child(
            self.measuring, MEASURE, context, threads, self.loader
        )
        return self._evaluator

    def _calls(self, context: RunContext) -> Calls:
        clean = self._caller(self._clean_child(context), context, loader=self.loader)

        def forked(op: str, timeout_s: float, **arguments: Any) -> dict[str, Any]:
            self._tainted = True
            return clean(op, timeout_s, fork=self._fork, **arguments)

        def started(op: str, timeout_s: float, **arguments: Any) -> dict[str, Any]:
            self._tainted = True
            return self._caller(self._loader_child(context), context, loader=self.loader)(
                op, timeout_s, **arguments
            )

        return Calls(clean, forked if self.forkable else started, self._fresh(context))

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
            with contextlib.suppress(*CHILD_FAULTS):
                self._caller(self._clean, context, loader=self.loader)(
                    "prepare", self.start_timeout_s
                )

    def _fresh(self, context: RunContext) -> Call:
        """Calls of the eval child's functions, each in a process in which nothing was measured
        before."""
        threads = len(context.cpus)

        def fork(op: str, timeout_s: float, **arguments: Any) -> dict[str, Any]:
            self._fork += 1
            call = self._caller(self._clean_child(context), context, loader=self.loader)
            call("prepare", self.start_timeout_s, fork=self._fork)
            return call(op, timeout_s, fork=self._fork, **arguments)

        def start(op: str, timeout_s: float, **arguments: Any) -> dict[str, Any]:
            child = self._child(self.measuring, MEASURE, context, threads, self.loader)
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


def body(digest: str, context: RunContext) -> Path:
    """A file with a config's body, for the children; raises ArtifactLost."""
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
