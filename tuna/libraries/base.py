"""The contract between Tuna and a library that it tunes.

A library says what is installed, which solvers it has and where they apply, and carries out steps on work items. It is
pure: it sees no SQL and no queue. Everything it needs is in the `WorkItem`, artifacts come from the `RunContext`, and
everything it finds is in the `StepResult`.
"""

from __future__ import annotations

import hashlib
import json
import math
from abc import ABC, abstractmethod
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Annotated, Any, Protocol

from pydantic import BaseModel, BeforeValidator, ConfigDict, Field

from tuna.configs import Config
from tuna.errors import BadInput, NotFound
from tuna.vocabulary import Cause, Resource

#: Version of the JSON form of WorkItem and StepResult; a worker refuses another one.
WIRE_VERSION = 2
#: A cause's output tail is cut to this many characters before it travels.
TAIL_CHARS = 4000


@dataclass(frozen=True)
class Step:
    """One stage of a job: its name, what it runs on, how many items share one message, and the limit of one item."""

    name: str
    resource: Resource
    chunk: int = 1
    time_limit_s: float = 600.0


@dataclass(frozen=True)
class Environment:
    """What makes two results comparable. `toolchain` alone decides who may compile, all of it who may measure."""

    library: str
    library_version: str
    arch: str
    num_cu: int
    toolchain: str
    device: str = ""  #: name of the device for people, such as the CPU model
    target: str = ""  #: what the compiler is told, in the library's own form
    flags: Mapping[str, str] = field(default_factory=dict)

    @property
    def key(self) -> str:
        """SHA-256 (first 16 hex digits) over every field."""
        text = json.dumps([*(getattr(self, name) for name in _ENVIRONMENT_TEXT), dict(sorted(self.flags.items()))])
        return hashlib.sha256(text.encode()).hexdigest()[:16]


_ENVIRONMENT_TEXT = ("library", "library_version", "arch", "num_cu", "toolchain", "device", "target")


@dataclass(frozen=True)
class Solver:
    """One implementation that a library has for some kinds of config."""

    name: str
    kinds: tuple[str, ...]  #: config kinds, such as ("convolution",)
    algorithm: str  #: family for find databases: Direct, GEMM, Winograd, ImplicitGEMM, FFT
    tunable: bool = True
    dynamic: bool = False
    number: int | None = None  #: the library's own id of it


class _Wire(BaseModel):
    model_config = ConfigDict(extra="forbid", frozen=True, ser_json_inf_nan="constants")


def _no_half_characters(text: Any) -> Any:
    """Half of a surrogate pair, which a program may print and JSON may hold, cannot be sent on."""
    return text if not isinstance(text, str) or text.isascii() else text.encode(errors="replace").decode()


def _known(value: Any) -> Any:
    """What is not finite is not known."""
    return None if isinstance(value, float) and not math.isfinite(value) else value


# What the columns of the database can hold: one value that does not fit would lose the results beside it.
_Version = Annotated[int, Field(ge=WIRE_VERSION, le=WIRE_VERSION)]
_Id = Annotated[int, Field(ge=0, lt=2**63)]
_Count = Annotated[int, Field(ge=0, lt=2**31)]
_Digest = Annotated[str, Field(max_length=64)]
_Name = Annotated[str, Field(max_length=255)]
_Long = Annotated[str, Field(max_length=1 << 20)]
_Output = Annotated[str, BeforeValidator(_no_half_characters)]
_Known = Annotated[float | None, BeforeValidator(_known)]
#: Seconds since the epoch, up to the year 2242.
_Moment = Annotated[float, Field(ge=0, lt=2**33, allow_inf_nan=False)]


class Candidate(_Wire):
    """A built candidate that is to be measured."""

    index: _Count
    artifact: _Digest | None = None  #: SHA-256 of the compiled code in the artifact store


class WorkItem(_Wire):
    """All that a worker needs for one step of one job."""

    version: _Version = WIRE_VERSION
    job_id: int
    attempt: int  #: fencing token: a result of another attempt is refused
    session_id: int
    library: str
    step: str
    solver: str
    config: dict[str, Any]  #: `Config.to_json()`
    target: str = ""  #: the session's `Environment.target`
    seed: int = 0  #: derived from config and solver, so that a candidate can be proposed again
    options: dict[str, Any] = Field(default_factory=dict)  #: job options, such as {"candidates": 8}
    candidates: tuple[Candidate, ...] = ()  #: what the steps before built
    known_params: str | None = None  #: best params so far, for a library that `uses_known_params`


class Trial(_Wire):
    """One candidate as far as the step got with it. A failed one has a cause."""

    index: _Count
    params: _Long | None = None  #: text form of the point in the solver's space (set by the step that proposes)
    artifact: _Digest | None = None
    cause: Cause | None = None
    output_tail: _Output = ""
    times_ms: tuple[float, ...] = ()  #: every repeat of the measurement
    time_ms: float | None = None  #: median of the repeats; None until measured
    max_error: _Known = None  #: largest error relative to the reference's largest magnitude
    build_s: _Known = None


class DeviceReport(_Wire):
    """The device that a result was measured on, as the worker saw it."""

    name: _Name
    peak_gflops: _Known = None  #: measured in this worker, fp32


class CodeObject(_Wire):
    """Compiled code that a result needs at run time, as the library's loader asks for it."""

    artifact: _Digest  #: SHA-256 of the code in the artifact store
    name: Annotated[str, Field(max_length=1024)] = ""  #: empty: exporters give it one
    args: _Long = ""


class StepResult(_Wire):
    """Everything that one attempt at a step found."""

    version: _Version = WIRE_VERSION
    job_id: _Id
    attempt: _Count
    step: str
    ok: bool
    cause: Cause | None = None
    output_tail: _Output = ""
    reproduce: _Long = ""  #: command line that repeats the attempt when pasted
    trials: tuple[Trial, ...] = ()
    workspace_bytes: _Id = 0
    algorithm: Annotated[str, Field(max_length=64)] = ""  #: as the library names it; empty: the solver's family
    problem_key: _Name = ""  #: the library's own name of the config, where it is not the one that Tuna would give it
    #: what the best trial needs at run time; None: the artifact of that trial
    kernels: tuple[CodeObject, ...] | None = None
    #: artifact that describes the job's problem for exporters (for tvm: the workload as JSON)
    workload: _Digest | None = None
    device: DeviceReport | None = None
    started_at: _Moment = 0.0  #: seconds since the epoch, worker's clock
    ended_at: _Moment = 0.0
    busy_s: _Moment = 0.0  #: seconds during which the step's resource did the job's own work


class ArtifactStore(Protocol):
    """Where compiled code lives, addressed by the SHA-256 of its bytes."""

    def put(self, data: bytes) -> str:
        """Store `data` and return its SHA-256; raises StorageFull when there is no room, and leaves nothing behind."""

    def path(self, digest: str) -> Path:
        """A local file with the verified bytes; raises KeyError if it is gone or its bytes differ from the hash."""

    def get(self, digest: str) -> bytes:
        """The verified bytes; raises KeyError if they are gone or differ from the hash."""


@dataclass(frozen=True)
class RunContext:
    """What a worker lends a library while a step runs."""

    artifacts: ArtifactStore
    scratch: Path  #: private to this process, removed when it ends
    cpus: tuple[int, ...]  #: cores that the step may use


class Library(ABC):
    """A library that Tuna can tune. One instance lives as long as its process."""

    name: str
    kinds: tuple[str, ...]
    steps: tuple[Step, ...]
    #: Whether work items carry the best params that the session has for their config and solver.
    uses_known_params: bool = False

    @abstractmethod
    def environment(self) -> Environment:
        """What is installed here; raises LibraryMissing with the command that installs it."""

    def environment_by_hand(self, facts: Mapping[str, str]) -> Environment:
        """The environment of another machine, described by `facts`; raises BadInput where that makes no sense."""
        raise BadInput(f"{self.name} finds out its environment by itself; {', '.join(sorted(facts))} cannot be given.")

    def toolchain(self) -> str:
        """What decides who may compile; a library whose `environment` is slow to tell answers faster here."""
        return self.environment().toolchain

    @abstractmethod
    def solvers(self) -> Sequence[Solver]:
        """Every solver of the installed version; needs neither the device nor the library itself."""

    @abstractmethod
    def applicable(self, configs: Iterable[Config], environment: Environment) -> Iterator[tuple[Config, Sequence[str]]]:
        """For each config the names of the solvers that can run it in a session's environment."""

    @abstractmethod
    def run(self, step: Step, items: Sequence[WorkItem], context: RunContext) -> Iterator[StepResult]:
        """Carry out `step` for each item, in order, yielding each result as soon as it is there.

        A candidate that crashes, hangs or answers wrongly is a failed `Trial`; an item fails (`ok=False`) when none of
        its trials is good. It raises only for faults of Tuna itself.
        """

    def next_step(self, result: StepResult, steps: Sequence[str]) -> str | None:
        """The step after a good `result`, None when the job is done; a library that searches in rounds goes back."""
        position = steps.index(result.step) + 1
        return steps[position] if position < len(steps) else None

    def path_to(self, step: str) -> Sequence[str]:
        """The steps that a job must go through to get `step` done, it included: what `tuna reproduce` runs."""
        names = [known.name for known in self.steps]
        return names[: names.index(step) + 1]

    def reproduce(self, item: WorkItem, index: int | None = None) -> str:
        """The command line that repeats the item, or one candidate of it, when pasted."""
        import shlex

        from tuna.configs import from_json

        words = ["tuna", "reproduce", "--library", self.name, "--step", item.step, "--solver", item.solver]
        words += ["--seed", str(item.seed)]
        words += [w for key, value in sorted(item.options.items()) for w in ("--option", f"{key}={value}")]
        words += [] if index is None else ["--index", str(index)]
        return shlex.join([*words, from_json(item.config).driver()])

    def close(self) -> None:  # noqa: B027  # most libraries have none
        """Give back child processes; called once when the process ends."""

    def step(self, name: str) -> Step:
        """The step called `name`; raises NotFound with the steps there are."""
        for step in self.steps:
            if step.name == name:
                return step
        raise NotFound(f"{self.name} has no step {name!r}.", hint=f"steps: {', '.join(s.name for s in self.steps)}")


def canonical_name(solver: str) -> str:
    """A solver's name as databases have it: `ConvWinograd3x3MultipassWrW<3, 4>` becomes `...<3-4>`."""
    return solver.strip().replace(", ", "-").replace(",", "-")


def result_of(item: WorkItem, **facts: Any) -> StepResult:
    """The result of an attempt at `item`."""
    return StepResult(job_id=item.job_id, attempt=item.attempt, step=item.step, **facts)


def tail(text: str) -> str:
    """The end of `text`, cut to what may travel in a result."""
    return text[-TAIL_CHARS:]
