"""The contract between Tuna and a library that it tunes.

A library reports what is installed, its solvers and their applicability, and runs steps on work
items. It has no access to SQL or queues. Everything it needs is in the `WorkItem`, artifacts come
from the `RunContext`, and everything it finds is in the `StepResult`.
"""

from __future__ import annotations

import hashlib
import json
from abc import ABC, abstractmethod
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from enum import Enum
from typing import Any

from tuna.configs import Config
from tuna.libraries.context import RunContext
from tuna.libraries.device_use import DeviceUse
from tuna.libraries.exporter import Exporter
from tuna.libraries.items import StepResult, WorkItem
from tuna.libraries.options import Condition, JobOptions
from tuna.libraries.params_text import ParamsText
from tuna.vocabulary import BASELINE, SEARCH, Cause, Resource

#: Name of the step of `Library.finals`
FINALS = "finals"


class Again(str, Enum):
    """Whether and where a failed attempt is repeated."""

    NEVER = "never"  #: permanent: a repetition would fail too
    #: permanent once another worker has failed in the same way, if there is one
    CONFIRMED = "confirmed"
    ANYWHERE = "anywhere"  #: tried again on any worker
    #: tried again on another worker than the one that failed, if there is one
    ELSEWHERE = "elsewhere"


@dataclass(frozen=True)
class Retry:
    """Retry policy after a failed attempt."""

    again: Again = Again.ANYWHERE
    #: true to go back to the job's first step, because its artifact is lost
    first_step: bool = False
    #: true to count against TUNA_MAX_ATTEMPTS; uncharged failures are charged after 20 in a row
    charged: bool = True
    delay_s: float = 0.0  #: seconds before the first repetition
    backoff: float = 2.0  #: factor by which the delay grows with each further failure
    max_delay_s: float = 600.0

    def wait_s(self, failures: int) -> float:
        """Seconds to wait before the attempt that follows `failures` failed ones (1 or more)."""
        if not self.delay_s:
            return 0.0
        try:
            return min(self.max_delay_s, self.delay_s * self.backoff ** (failures - 1))
        except OverflowError:
            return self.max_delay_s


#: Policy by cause: the same code would be built and answer the same, if the machine is sound; a
#: lost artifact is compiled again; the rest is tried again, if possible elsewhere
DEFAULT_RETRIES: Mapping[Cause, Retry] = {
    **{cause: Retry(Again.ELSEWHERE) for cause in Cause},
    Cause.DEVICE_LOST: Retry(Again.ELSEWHERE, charged=False),
    Cause.BUILD_ERROR: Retry(Again.CONFIRMED),
    Cause.WRONG_RESULT: Retry(Again.CONFIRMED),
    Cause.NOT_APPLICABLE: Retry(Again.NEVER),
    Cause.ARTIFACT_LOST: Retry(first_step=True),
}


@dataclass(frozen=True)
class Step:
    """One stage of a job: its name, its resource, how many items share one message, and the time
    limit of one item."""

    name: str
    resource: Resource
    chunk: int = 1
    time_limit_s: float = 600.0
    urgent: bool = False  #: true if its messages overtake those of other steps in the queue
    #: steps that must be repeated before this one; None: all before it in `Library.steps`
    needs: tuple[str, ...] | None = None
    #: retry policies after a failed attempt, where they differ from `DEFAULT_RETRIES`
    retries: Mapping[Cause, Retry] = field(default_factory=dict, hash=False)

    def retry(self, cause: Cause) -> Retry:
        """Return the retry policy of a job whose attempt failed for `cause`."""
        return self.retries.get(cause, DEFAULT_RETRIES[cause])


@dataclass(frozen=True)
class Environment:
    """The facts that make two results comparable. `toolchain` alone decides which worker may
    compile, all of them which may measure."""

    library: str
    library_version: str
    arch: str
    num_cu: int
    toolchain: str
    device: str = ""  #: readable name of the device, such as the CPU model
    target: str = ""  #: target of the compiler, in the library's own form
    flags: Mapping[str, str] = field(default_factory=dict)
    #: conditions that the session chose, without those left at their default
    conditions: Mapping[str, str] = field(default_factory=dict)

    @property
    def key(self) -> str:
        """SHA-256 (first 16 hex digits) over every field: equal for comparable results."""
        facts = [dict(v) if isinstance(v, Mapping) else v for v in vars(self).values()]
        # sessions without conditions are older than these, and keep their key
        text = json.dumps(facts if self.conditions else facts[:-1], sort_keys=True)
        return hashlib.sha256(text.encode()).hexdigest()[:16]

    @property
    def machine_key(self) -> str:
        """The same without the conditions: who may measure."""
        return replace(self, conditions={}).key

    def __str__(self) -> str:
        """Return a readable line."""
        words = [f"{self.library} {self.library_version}", f"{self.arch} x {self.num_cu}"]
        words += [self.device] if self.device else []
        return ", ".join(words + [f"{name} {value}" for name, value in self.conditions.items()])


@dataclass(frozen=True)
class Solver:
    """One implementation that a library has for some kinds of config."""

    name: str
    kinds: tuple[str, ...]  #: kinds of config, such as ("convolution",)
    #: family for find databases: Direct, GEMM, Winograd, ImplicitGEMM, FFT; or BASELINE
    algorithm: str
    tunable: bool = True
    dynamic: bool = False
    number: int | None = None  #: library's own id of the solver; None: it has none
    #: largest allowed error, relative to the largest magnitude of the answer; None: the reference's
    #: tolerance
    error_bound: float | None = None

    @property
    def baseline(self) -> bool:
        """Whether it only shows what tuning gains: never a layer's winner where another solver has
        a result."""
        return self.algorithm == BASELINE


@dataclass(frozen=True)
class Finals:
    """An additional job that measures the winners of a config's solvers again, interleaved, because
    they were measured at different times."""

    #: step of the finals, called FINALS
    step: Step = Step(FINALS, Resource.DEVICE, time_limit_s=1800.0)
    #: true if baselines take part, because exports depend on what was gained over them
    baselines: bool = False
    #: true if the winner of a search of several rounds has finals alone, because the fastest of the
    #: rounds' winners is so by chance too
    after_rounds: bool = False

    def takes_part(self, options: Mapping[str, Any]) -> bool:
        """Whether the winner of a job with these options is measured again: not where they ask for
        no finalists, since its candidates are then compared in another way."""
        return options.get("finalists") != 0


@dataclass(frozen=True)
class RoundsOutcome:
    """Outcome of the complete rounds of a search."""

    #: time of each trial, in the order of rounds and candidates; None: it failed
    times_ms: Sequence[float | None]
    rounds: int  #: number of complete rounds
    opened: int  #: number of rounds, complete or not
    proposed: int  #: number of candidates of all opened rounds
    #: seconds since the first search of its config began, without pauses of the session
    elapsed_s: float
    round_s: float  #: seconds of the longest round, without pauses
    result_ms: float | None = None  #: time of the search's result; trials may be shorter by chance


@dataclass(frozen=True)
class SearchLimits:
    """Seconds after the first search of a config began, without pauses of the session."""

    begin: float  #: seconds after which rounds are given up that no worker has begun
    last: float  #: seconds after which all rounds are given up that are not being measured


class SearchRules(ABC):
    """Rules of jobs that search in rounds: a round's candidates are proposed from the trials of
    earlier rounds. `options` are a job's."""

    #: step called `search`, with which such jobs begin; one that proposes no trials ends its round
    step: Step = Step(SEARCH, Resource.CPU, time_limit_s=1800.0, urgent=True)

    @abstractmethod
    def solvers(self, names: Iterable[str], options: Mapping[str, Any]) -> Collection[str]:
        """Return the solvers of `names` whose jobs search."""

    def ends(self, options: Mapping[str, Any], outcome: RoundsOutcome) -> str | None:
        """Why a search is over, in a few words; None: another round may be opened."""
        return f"{outcome.rounds} rounds"

    def look_ahead(self, options: Mapping[str, Any]) -> int:
        """Return how many rounds may be open beside the oldest open one: a round is proposed from
        the results of all but so many before it."""
        return 1

    def warm_starts(self, options: Mapping[str, Any]) -> bool:
        """Whether a search learns from earlier searches: whether its work items carry
        `siblings`."""
        return False

    def limits_s(self, options: Mapping[str, Any]) -> SearchLimits | None:
        """When a search gives up rounds; None: never."""
        return None

    def gives_up_rest(self, why: str) -> bool:
        """Whether a search that ended for this reason gives up rounds not yet begun: what it tries
        then depends on timing."""
        return False

    def max_rounds(self, options: Mapping[str, Any]) -> int | None:
        """Return the largest number of rounds, from which progress is estimated; None: no limit."""
        return None


class Library(ABC):
    """A library that Tuna can tune. One instance lives as long as its process.

    What only some libraries can do is in `tuna.libraries.abilities`.
    """

    name: str
    kinds: tuple[str, ...]
    steps: tuple[Step, ...]
    #: None: times of different solvers are compared as they are.
    finals: Finals | None = None
    #: model of the library's job options
    options: type[JobOptions] = JobOptions
    #: conditions of measurement that a session may choose
    conditions: Sequence[Condition] = ()
    device: DeviceUse = DeviceUse()
    #: database formats of the library, each of which writes results of any library that it accepts
    exporters: Sequence[Exporter[Any]] = ()
    #: None: no job searches in rounds.
    search: SearchRules | None = None
    params: ParamsText = ParamsText()

    @abstractmethod
    def environment(self) -> Environment:
        """Return the environment of this machine; raises LibraryMissing with the command that
        installs what is missing."""

    @abstractmethod
    def solvers(self) -> Sequence[Solver]:
        """Every solver of the installed version; needs neither the device nor the library
        itself."""

    @abstractmethod
    def applicable(
        self, configs: Iterable[Config], environment: Environment
    ) -> Iterator[tuple[Config, Sequence[str] | None]]:
        """Yield each config with the names of the solvers that can run it in a session's
        environment.

        None for a config that gets no answer, such as one on which the library's program crashes;
        it counts as a failure.
        """

    @abstractmethod
    def run(
        self, step: Step, items: Sequence[WorkItem], context: RunContext
    ) -> Iterator[StepResult]:
        """Carry out `step` for each item, in order, yielding each result as soon as it is there.

        A candidate that crashes, hangs or answers wrongly is a failed `Trial`; an item fails
        (`ok=False`) when none of its trials is good. It raises only for faults of Tuna itself.
        After failures on a device a worker may close the iterator, have an item repeated that
        succeeded there, and call this again for the rest.
        """

    def time_limit_s(self, step: Step, item: WorkItem) -> float:
        """Seconds after which an attempt at `step` of `item` counts as hung; waiting for the device
        does not count."""
        return step.time_limit_s

    def close(self) -> None:  # noqa: B027  # most libraries have none
        """Release child processes; called once when the process ends."""
