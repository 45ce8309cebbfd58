"""Interfaces that the author of a `CandidateLibrary` implements: how kernels are proposed, built
and called.

All of it runs in child processes of the sandbox, which import it by name; a worker process never
does. So it may import a compiler, call foreign code and crash. Nothing else is imported here, so
that a child starts quickly.
"""

from __future__ import annotations

import math
import time
from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

from tuna.configs import Config, from_json

if TYPE_CHECKING:
    import numpy as np
    from numpy.typing import NDArray

    from tuna.libraries.reference import Problem


@dataclass(frozen=True)
class KernelJob:
    """The job that a child works on. Equal jobs have the same candidates, in every process and on
    every machine."""

    config: Config
    solver: str
    target: str = ""  #: `Environment.target` of the session
    #: value of every condition of measurement that the library has, as the session chose it
    conditions: Mapping[str, str] = field(default_factory=dict, hash=False)
    seed: int = 0
    count: int = 1  #: number of candidates to propose
    #: options of the job that the user set
    options: Mapping[str, Any] = field(default_factory=dict, hash=False)
    body: str = ""  #: file with the config's body; empty: its kind has none
    #: files on the device's machine with the config's `data_fields`, by field
    files: Mapping[str, str] = field(default_factory=dict, hash=False)

    @classmethod
    def from_json(cls, facts: Mapping[str, Any]) -> KernelJob:
        """The job as the parent process sent it."""
        return cls(**{**facts, "config": from_json(facts["config"])})


@dataclass(frozen=True)
class Past:
    """A candidate of an earlier round of a search."""

    params: str
    time_ms: float | None = None
    #: cause of the failure; None, without a time: it is still being measured
    cause: str | None = None

    @property
    def is_done(self) -> bool:
        """True if it was measured, or has failed."""
        return self.time_ms is not None or self.cause is not None


@dataclass(frozen=True)
class Known:
    """Trials of an earlier search from which this one may learn."""

    label: str  #: name of the search in logs, reports and cost models
    trials: Sequence[Past]
    #: true if its times are to be expected here: same config and environment, on a quiet device
    same: bool = True
    #: config of the search; None: that of this search, or an older version stored the trials
    config: Config | None = None


@dataclass(frozen=True)
class SearchRound:
    """A round of a search, with what it is proposed from."""

    history: Sequence[Past]  #: candidates of the rounds before
    count: int  #: maximum of candidates
    known: Sequence[Known] = ()  #: other searches, the same in all rounds
    #: cost model of a trained predictor, only where the library has `candidate_facts`
    prior: bytes | None = None


@dataclass(frozen=True)
class CandidateFacts:
    """A candidate as a predictor sees it."""

    #: name that the same candidate has for layers of other sizes; empty: it fits its own layer
    #: alone
    name: str
    features: Mapping[str, float]  #: features that a search's cost model sees


class Builder(ABC):
    """Proposes candidates and builds them, on a CPU that may belong to another machine than the one
    that measures."""

    @abstractmethod
    def propose(self, job: KernelJob) -> Sequence[str]:
        """The params of up to `job.count` different candidates, as text.

        The same job must get the same answer in another process: a child that replaces a crashed
        one is asked again, and `tuna reproduce` asks on another day.
        """

    @abstractmethod
    def build(self, job: KernelJob, params: str, path: Path) -> None:
        """Write the candidate with these params to `path` as compiled code, in the form that
        `Loader.load` takes.

        What it raises is the candidate's `build_error`. It is called only after `propose` in the
        same process, or with params that `search` returned in any process. A hang is ended, with
        all programs that were started, after the job option `build_timeout_s`.
        """

    def build_key(self, job: KernelJob, params: str) -> str:
        """Return text that is equal for candidates of which one can be made of another's file by
        `rebuild`; empty, the default: this one cannot.

        It says all that `rebuild` takes over from that file, such as the compiler's input and its
        options, but for the library, its toolchain and the config's body, which are compared
        beside it. A candidate for which it raises has no key, and a worker logs why.
        """
        return ""

    def rebuild(self, job: KernelJob, params: str, built: Path, path: Path) -> None:
        """Write to `path` the bytes that `build` would, from the file `built` of a candidate with
        the same build key, perhaps of another job and machine; by default a copy.

        Where it raises, a worker logs why and builds the candidate.
        """
        path.write_bytes(built.read_bytes())

    def search(self, job: KernelJob, asked: SearchRound) -> Sequence[str]:
        """Return the params of up to `asked.count` candidates that are not in the history; fewer:
        no more exist. The same arguments must get the same answer in another process."""
        raise NotImplementedError

    def workload(self, job: KernelJob) -> bytes:
        """Return a description of the job's problem for exporters; it is kept as an artifact unless
        it is empty."""
        return b""


class DeviceUnusable(Exception):
    """Raised by a `Loader` or `Kernel` whose process can no longer use the device, such as after an
    illegal access: the candidate fails, and the next one gets a new process."""

    ends = "process"


class DeviceLost(DeviceUnusable):
    """The device itself no longer answers: no candidate is at fault."""

    ends = "device"


class Kernel:
    """A built candidate with its arguments in place: what is checked and timed.

    This one calls a function of this process; a library for another device, or with its own clock,
    overrides it.
    """

    #: seconds of each run of `loop` that are not the kernel's, such as those of a call through
    #: Python; they are subtracted
    overhead_s: float = 0.0
    #: true if its own clock empties the device's caches before each run where the session's
    #: condition is `caches=cold`
    empties_caches: bool = False

    def __init__(self, run: Callable[[], object], arrays: Sequence[NDArray[Any]]) -> None:
        """`run` computes once, waits for the end, and leaves the answer in the last of `arrays`."""
        self._run, self._arrays = run, arrays

    def run(self) -> None:
        """Compute once and wait for the end."""
        self._run()

    def answer(self) -> NDArray[Any]:
        """The output of the last run."""
        return self._arrays[-1]

    def loop(self, number: int) -> None:
        """Compute `number` times without a pause: what is timed."""
        run = self._run
        for _ in range(number):
            run()

    def times_ms(self, number: int, repeats: int) -> list[float] | None:
        """`repeats` measurements by the device's own clock, in milliseconds for one run; each the
        mean of `number` runs.

        None, the default: `loop` is timed by the wall clock and the CPU time of this process, which
        tells when it was preempted.
        """
        return None

    def parts_ms(self) -> Mapping[str, float]:
        """Milliseconds of each part of a run, by name; called after the candidate was timed.

        None are known by default.
        """
        return {}


def shortest_call_s(call: Callable[[], object], *, calls: int, tries: int) -> float:
    """Seconds of one call, such as for `Kernel.overhead_s`: the mean of `calls` in the fastest of
    `tries`, for a preempted one says nothing."""
    best = math.inf
    for _ in range(tries):
        started = time.perf_counter()
        for _ in range(calls):
            call()
        best = min(best, (time.perf_counter() - started) / calls)
    return best


class Loader(ABC):
    """Loads built candidates in the child that measures, on the cores or beside the device that are
    tuned for."""

    #: true if loading or running a candidate starts programs; otherwise a candidate that tries
    #: fails
    starts_programs: bool = False

    def takes_nan(self, job: KernelJob) -> bool:
        """Return whether candidates may be run on inputs full of NaN, which fills their workspace;
        one whose inputs decide what it reads may not."""
        return True

    @abstractmethod
    def load(self, job: KernelJob, path: Path, arrays: Sequence[np.ndarray]) -> Kernel:
        """The candidate in the file `path`, ready to run on `arrays`: the config's inputs, then its
        output.

        Types and shapes are those of the config's NumPy reference; the output is full of NaN (or of
        the smallest integer). It may be called several times for one file. What it raises is the
        candidate's `run_error`.
        """

    def reference(self, job: KernelJob) -> Problem | None:
        """Inputs of the job's config and the right answer; None, the default: those of the
        reference that the config's kind has.

        For configs that are programs, which no reference in NumPy can know. It must not depend on
        the job's solver.
        """
        return None

    def error_bound(self, job: KernelJob) -> float:
        """Largest error, relative to the largest magnitude of the answer, that the job's solver may
        have.

        The tolerance of the config's reference holds in any case.
        """
        return math.inf

    def peak_gflops(self) -> float | None:
        """Peak of the device in fp32, for reports; None: that of the cores of this process, by a
        loop of multiply-adds."""
        return None
