"""Enums and constants of several packages: states, causes, resources, queues. Imports nothing."""

from __future__ import annotations

from enum import Enum
from typing import Final, TypeVar

#: First step of jobs that search in rounds
SEARCH = "search"
#: Maximum of bytes of an artifact; code objects are much smaller, so a larger file is damaged
MAX_BYTES = 1 << 30
#: Seconds for which an outage of Redis, the broker or SQL is retried by what ends with its work
OUTAGE_S = 600.0
#: `Solver.algorithm` of baselines in databases
BASELINE = "Baseline"
#: Class of a layer that was not measured, and for which a predictor chose a configuration
PREDICTED: Final = "predicted"

_State = TypeVar("_State", bound=Enum)


def canonical_name(solver: str) -> str:
    """Return a solver's name as databases have it: `Conv...WrW<3, 4>` becomes `Conv...WrW<3-4>`."""
    return solver.strip().replace(", ", "-").replace(",", "-")


def kind_text(kind: str) -> str:
    """A kind of config in words."""
    return kind.replace("_", " ")


class State(str, Enum):
    """State of a job."""

    NEW = "new"  #: waits for its first step
    COMPILE_QUEUED = "compile_queued"  #: leased and published for a CPU step
    COMPILING = "compiling"  #: a worker took it
    #: the CPU step is done: final when it was the last step, else waits for the next
    COMPILED = "compiled"
    #: waits for a CPU step that is not the first: `search` has proposed what to compile
    SEARCHING = "searching"
    EVAL_QUEUED = "eval_queued"  #: leased and published for a device step
    EVALUATING = "evaluating"  #: a worker took it
    EVALUATED = "evaluated"  #: every step is done
    ERRORED = "errored"  #: gave up; the cause says why
    CANCELED = "canceled"  #: a person ended it


#: States with a lease: a worker or a queue has the job
IN_FLIGHT = frozenset({State.COMPILE_QUEUED, State.COMPILING, State.EVAL_QUEUED, State.EVALUATING})
#: States of a job that has ended; `compiled` is not among them, because the drain moves a job whose
#: last step ran on a CPU on to `evaluated`
END_STATES = (State.EVALUATED, State.ERRORED, State.CANCELED)


class Resource(str, Enum):
    """Resource that a step needs."""

    CPU = "cpu"  #: any core of a compile machine
    DEVICE = "device"  #: a device of the session's environment


class Cause(str, Enum):
    """Why an attempt, a trial or a job failed."""

    BUILD_ERROR = "build_error"  #: the compiler refused or crashed
    BUILD_TIMEOUT = "build_timeout"  #: the compiler ran past its limit
    RUN_ERROR = "run_error"  #: the kernel crashed or raised
    RUN_TIMEOUT = "run_timeout"  #: the kernel hung
    WRONG_RESULT = "wrong_result"  #: the kernel's answer differs from the reference
    WORKER_LOST = "worker_lost"  #: the worker died or went silent
    DEVICE_LOST = "device_lost"  #: the device no longer answers
    NOT_APPLICABLE = "not_applicable"  #: the solver cannot run this config after all
    ARTIFACT_LOST = "artifact_lost"  #: a compiled artifact is gone or damaged: compile again
    INFRA = "infra"  #: Tuna or the machine failed, not the candidate


#: Policies of coordinators (docs/scheduling.md), then those that only `tuna simulate` compares
PUBLISHING_POLICIES = ("auto", "fair", "gradient", "shortest", "deadline")
COMPARED_POLICIES = ("fifo", "sequential", "greedy", "synchronous", "unsynchronised", "bundled")


class GoldenState(str, Enum):
    """Lifecycle of a golden version."""

    DRAFT = "draft"  #: may still be overwritten
    PROMOTED = "promoted"  #: released; never changes
    WITHDRAWN = "withdrawn"  #: was released, then rolled back; never changes


class RequestState(str, Enum):
    """State of a request of a visitor of the service."""

    ACCEPTED = "accepted"  #: written down; its file is being read
    KNOWN = "known"  #: answered by what was known, without a trial
    TUNING = "tuning"  #: jobs are worked on, or the model is built
    BUILT = "built"  #: answered by what was tuned for it, as far as its budget allowed
    FAILED = "failed"  #: failed without an answer; its message says why
    CANCELED = "canceled"  #: ended by its visitor, or by an admin

    __str__ = str.__str__


def state_diagram(transitions: dict[_State, frozenset[_State]]) -> str:
    """A table of transitions, the first state first, as a Mermaid state diagram, which code hosts
    draw."""
    first = next(iter(transitions))
    lines = ["stateDiagram-v2", f"    [*] --> {first.value}"]
    for state, following in transitions.items():
        lines += [f"    {state.value} --> {one.value}" for one in type(first) if one in following]
        if not following:
            lines.append(f"    {state.value} --> [*]")
    return "\n".join(lines)


def queue_name(step_is_on_device: bool, toolchain: str, environment: str) -> str:
    """`compile.<toolchain>` for any machine that has it, `eval.<environment>` for its devices."""
    return f"eval.{environment}" if step_is_on_device else f"compile.{toolchain}"
