"""The contract between Tuna and a library that it tunes.

A library reports what is installed, its solvers and their applicability, and runs steps on work
items. It has no access to SQL or queues. Everything it needs is in the `WorkItem`, artifacts come
from the `RunContext`, and everything it finds is in the `StepResult`.
"""

from __future__ import annotations

import hashlib
import json
import shlex
from abc import ABC, abstractmethod
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from enum import Enum
from typing import Any

from tuna.common.messages import choices
from tuna.configs import Config
from tuna.errors import BadInput, NotFound
from tuna.libraries.context import DeviceHandle, RunContext
from tuna.libraries.exporter import Exporter
from tuna.libraries.items import Candidate, Rival, StepResult, WorkItem
from tuna.libraries.kernels import CandidateFacts
from tuna.libraries.options import Condition, JobOptions, complete
from tuna.vocabulary import BASELINE, Cause, Resource, kind_text

#: Trials in one result, where the library says nothing else.
_MAX_TRIALS = 64
#: Name of the step of `Library.finals`.
FINALS = "finals"


@dataclass(frozen=True)
class Step:
    """One stage of a job: its name, its resource, how many items share one message, and the time
    limit of one item."""

    name: str
    resource: Resource
    chunk: int = 1
    time_limit_s: float = 600.0
    urgent: bool = False  #: its messages overtake those of other steps in the queue


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
    target: str = ""  #: the compiler's target, in the library's own form
    flags: Mapping[str, str] = field(default_factory=dict)
    conditions: Mapping[str, str] = field(
        default_factory=dict
    )  #: that the session chose; without those left at their default

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
class Found:
    """Outcome of the complete rounds of a search, for `Library.search_ends`."""

    #: of each trial, in the order of rounds and candidates; None: it failed
    times_ms: Sequence[float | None]
    rounds: int  #: that are complete
    opened: int  #: with those that are not
    proposed: int  #: candidates of these
    elapsed_s: float  #: since the first search of its config began, without pauses of the session
    round_s: float  #: the longest of them took, without these
    result_ms: float | None = None  #: of the search's result; trials may be shorter by chance


@dataclass(frozen=True)
class SearchLimits:
    """Seconds after the first search of a config began, without pauses of the session."""

    begin: float  #: when rounds are given up that no worker has begun
    last: float  #: when all are that are not being measured


@dataclass(frozen=True)
class Solver:
    """One implementation that a library has for some kinds of config."""

    name: str
    kinds: tuple[str, ...]  #: config kinds, such as ("convolution",)
    #: family for find databases: Direct, GEMM, Winograd, ImplicitGEMM, FFT; or BASELINE
    algorithm: str
    tunable: bool = True
    dynamic: bool = False
    number: int | None = None  #: the library's own id of it
    #: Largest error, relative to the largest magnitude of the answer, that it may have; None: the
    #: reference's tolerance.
    error_bound: float | None = None

    @property
    def baseline(self) -> bool:
        """Whether it only shows what tuning gains: never a layer's winner where another solver has
        a result."""
        return self.algorithm == BASELINE


class Again(str, Enum):
    """Whether and where a failed attempt is repeated."""

    NEVER = "never"  #: permanent: a repetition would fail too
    CONFIRMED = "confirmed"  #: permanent once another worker has found the same, while there is one
    ANYWHERE = "anywhere"  #: on any worker
    ELSEWHERE = "elsewhere"  #: on another worker than the one that failed, while there is one


@dataclass(frozen=True)
class Retry:
    """Retry policy after a failed attempt."""

    again: Again = Again.ANYWHERE
    first_step: bool = False  #: go back to the job's first step: its artifact is lost
    #: Counts against TUNA_MAX_ATTEMPTS. Uncharged failures are charged after 20 in a row.
    charged: bool = True
    delay_s: float = 0.0  #: before the first repetition
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


#: The same code would be built and answer the same, if the machine is sound; a lost artifact is
#: compiled again; the rest is tried again, if possible elsewhere.
DEFAULT_RETRIES: Mapping[Cause, Retry] = {
    **{cause: Retry(Again.ELSEWHERE) for cause in Cause},
    Cause.DEVICE_LOST: Retry(Again.ELSEWHERE, charged=False),
    Cause.BUILD_ERROR: Retry(Again.CONFIRMED),
    Cause.WRONG_RESULT: Retry(Again.CONFIRMED),
    Cause.NOT_APPLICABLE: Retry(Again.NEVER),
    Cause.ARTIFACT_LOST: Retry(first_step=True),
}


class Library(ABC):
    """A library that Tuna can tune. One instance lives as long as its process."""

    name: str
    kinds: tuple[str, ...]
    steps: tuple[Step, ...]
    #: The step, called `search`, with which jobs begin that search in rounds: it proposes
    #: candidates from the trials of earlier rounds. None: no job does.
    search: Step | None = None
    #: The step, called FINALS, of an additional job that measures the winners of a config's solvers
    #: again, interleaved, because they were measured at different times; None: their times are
    #: compared as they are.
    finals: Step | None = None
    #: Whether baselines take part in finals, because exports depend on what was gained over them.
    baselines_in_finals: bool = False
    #: Whether there are finals also for the winner of a search of several rounds alone, because the
    #: fastest of the rounds' winners is so by chance too.
    finals_after_rounds: bool = False
    #: Model of its job options.
    options: type[JobOptions] = JobOptions
    #: Conditions of measurement that a session may choose.
    conditions: Sequence[Condition] = ()
    #: Vendor of the devices that its device steps use; None: the first GPU that the worker may use,
    #: else its measuring cores.
    device_kind: str | None = None
    #: The database formats that it brings; each writes results of any library that it accepts.
    exporters: Sequence[Exporter[Any]] = ()
    #: Whether its builds use measuring cores while nothing is measured there (`RunContext.build`
    #: with a `pid`).
    borrows_cores: bool = False
    #: Whether work items carry the best params that the session has for their config and solver.
    uses_known_params: bool = False

    @abstractmethod
    def environment(self) -> Environment:
        """Return the environment of this machine; raises LibraryMissing with the command that
        installs what is missing."""

    def environment_by_hand(self, facts: Mapping[str, str]) -> Environment:
        """The environment of another machine, described by `facts`; raises BadInput where that
        makes no sense."""
        self.check_facts(facts)
        return self.environment()

    def check_facts(self, facts: Mapping[str, str], *known: str) -> None:
        """Raise BadInput if there are other `facts` of an environment than these."""
        if others := sorted(facts.keys() - set(known)):
            takes = f"it takes {', '.join(known)}"
            raise BadInput(
                f"{self.name} takes no {' and no '.join(others)}.",
                hint=takes if known else "it finds out its environment by itself",
            )

    def conditions_of(self, item: WorkItem) -> dict[str, str]:
        """Every condition with the value that the item's session has."""
        return complete(self.conditions, item.conditions)

    def toolchain(self) -> str:
        """Identifies who may compile; to be overridden by a library whose `environment` is slow."""
        return self.environment().toolchain

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

    def unsupported(self, config: Config) -> str:
        """Return the feature of a config that no solver supports, such as "transposed
        convolutions"; called for configs without a solver.

        Empty where nothing is lacking, since the config needs no solver. By default the config's
        kind.
        """
        known = "this " if config.kind in self.kinds else ""
        return f"{known}{kind_text(config.kind)}"

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

    def probe(self, device: DeviceHandle) -> str:
        """Why `device` does not answer, empty when it does.

        Asked before a worker's first chunk, after each failed attempt, and before a worker that was
        put aside comes back. Takes seconds at most: use a separate child with a time limit. The
        default does not check, and assumes a healthy device.
        """
        return ""

    def own_device(self) -> DeviceHandle | None:
        """The device that its steps on a device use, where that is none of this machine's; None,
        the default: it is one."""
        return None

    def time_limit_s(self, step: Step, item: WorkItem) -> float:
        """Seconds after which an attempt at `step` of `item` counts as hung; waiting for the device
        is no part of it."""
        return step.time_limit_s

    def retry(self, cause: Cause) -> Retry:
        """The retry policy of a job whose attempt failed for `cause`."""
        return DEFAULT_RETRIES[cause]

    def most_trials(self, options: Mapping[str, Any]) -> int:
        """The number of trials that a step of a job with these options may report: a result with
        more is refused."""
        return _MAX_TRIALS

    def searched(self, solvers: Iterable[str], options: Mapping[str, Any]) -> Collection[str]:
        """Return the `solvers` whose jobs search in rounds and so begin with the step `search`."""
        return ()

    def search_ends(self, options: Mapping[str, Any], found: Found) -> str | None:
        """Why a search with these job options is over, in a few words; None: another round may be
        opened."""
        return f"{found.rounds} rounds"

    def look_ahead(self, options: Mapping[str, Any]) -> int:
        """Return how many rounds of a search may be open beside the oldest one that is: a round is
        proposed from the results of all but so many before it."""
        return 1

    def warm_starts(self, options: Mapping[str, Any]) -> bool:
        """Whether a search with these job options learns from earlier searches: whether its work
        items carry `siblings`."""
        return False

    def search_limits_s(self, options: Mapping[str, Any]) -> SearchLimits | None:
        """When a search with these job options gives up rounds; None: never."""
        return None

    def gives_up_rest(self, why: str) -> bool:
        """Whether a search that ended for this reason gives up rounds not yet begun: what it tries
        then depends on timing."""
        return False

    def most_rounds(self, options: Mapping[str, Any]) -> int | None:
        """Return the largest number of rounds of a search with these job options, from which
        progress is estimated; None: no limit."""
        return None

    def next_step(self, result: StepResult, steps: Sequence[str]) -> str | None:
        """The step after a good `result`, None when the job, or this round of it, is done."""
        position = steps.index(result.step) + 1
        return steps[position] if position < len(steps) else None

    def path_to(self, step: str) -> Sequence[str]:
        """The steps that a job must go through to get `step` done, it included: what `tuna
        reproduce` runs."""
        names = [known.name for known in self.steps]
        if step == FINALS:
            raise BadInput(
                "Finals cannot be repeated by themselves.",
                hint="take the command that their attempt has",
            )
        return names[: names.index(step) + 1]

    def reproduce(self, item: WorkItem, index: int | None = None) -> str:
        """The command line that repeats the item, or one candidate of it, when pasted; not that of
        finals."""
        words = ["tuna", "reproduce", "--library", self.name, "--step", item.step]
        words += ["--solver", item.solver, "--seed", str(item.seed)]
        for option, given in (("--option", item.options), ("--condition", item.conditions)):
            for key, value in sorted(given.items()):
                words += [option, f"{key}={value}"]
        words += [] if index is None else ["--index", str(index)]
        return shlex.join([*words, item.layer.text()])

    def readable_params(self, params: str) -> str:
        """Return a candidate's params as one short readable line; they may come from another
        version. The default changes nothing."""
        return params

    def candidate_facts(self, params: str) -> CandidateFacts | None:
        """Return what a predictor sees of a candidate, which may come from another version; None,
        the default: it is not learned from. Needs neither the device nor the library itself."""
        return None

    def built_in_prior(self) -> bytes | None:
        """Return the cost model with which searches begin where no predictor was trained; None, the
        default: there is none."""
        return None

    def params_by_name(self, params: str) -> Mapping[str, Any]:
        """Return a candidate's params as JSON values by name, for tools that compare candidates;
        empty: they have no names. The default reads a JSON object."""
        try:
            found = json.loads(params)
        except (ValueError, RecursionError):
            return {}
        return found if isinstance(found, dict) else {}

    def of_rival(self, item: WorkItem, rival: Rival) -> WorkItem:
        """The last step of the rival's own job, for its winner alone; `item` is that of the
        finals."""
        facts = {"solver": rival.solver, "seed": rival.seed, "options": rival.options}
        candidates = (Candidate(index=rival.number, artifact=rival.artifact),)
        return item.model_copy(
            update={**facts, "step": self.steps[-1].name, "candidates": candidates, "rivals": ()},
        )

    def takes_part_in_finals(self, options: Mapping[str, Any]) -> bool:
        """Whether the winner of a job with these options is measured again in the finals of its
        config."""
        return True

    @property
    def every_step(self) -> Sequence[Step]:
        """The steps of its jobs, those of searches and of finals too."""
        return (
            *([self.search] if self.search else ()),
            *self.steps,
            *([self.finals] if self.finals else ()),
        )

    def served_with(self, steps: Sequence[str]) -> Sequence[Step]:
        """The steps with these names (all when empty), the search with any on a CPU, the finals
        with any on the device."""
        chosen = {self.step(name) for name in steps} or set(self.every_step)
        resources = {step.resource for step in chosen}
        chosen |= {self.search} if self.search and self.search.resource in resources else set()
        chosen |= {self.finals} if self.finals and self.finals.resource in resources else set()
        return [step for step in self.every_step if step in chosen]

    def warm_up(self, context: RunContext) -> None:  # noqa: B027  # most libraries start nothing
        """Start what is slow to start, without waiting for it; called once by a worker that will
        run steps of this library."""

    def close(self) -> None:  # noqa: B027  # most libraries have none
        """Release child processes; called once when the process ends."""

    def step(self, name: str) -> Step:
        """The step called `name`; raises NotFound with the steps there are."""
        for step in self.every_step:
            if step.name == name:
                return step
        raise NotFound(
            f"{self.name} has no step {name!r}.",
            hint=choices(name, (s.name for s in self.steps), "steps"),
        )
