"""A job: its states, the only table of allowed transitions, and the two shapes in which hot
statements read it; `python -m tuna.jobs.states` prints the table as a drawing."""

from __future__ import annotations

from datetime import datetime, timezone
from typing import Any, NamedTuple

from tuna.vocabulary import IN_FLIGHT, Resource, State, state_diagram

#: States that may follow each state
TRANSITIONS: dict[State, frozenset[State]] = {
    # To evaluated: a known result is as fast as was asked for.
    State.NEW: frozenset(
        {State.COMPILE_QUEUED, State.EVAL_QUEUED, State.EVALUATED, State.CANCELED}
    ),
    State.COMPILE_QUEUED: frozenset(
        {State.COMPILING, State.NEW, State.COMPILED, State.SEARCHING, State.ERRORED, State.CANCELED}
    ),
    State.COMPILING: frozenset(
        {State.COMPILED, State.NEW, State.SEARCHING, State.ERRORED, State.CANCELED}
    ),
    State.COMPILED: frozenset({State.EVAL_QUEUED, State.COMPILE_QUEUED, State.NEW, State.CANCELED}),
    State.SEARCHING: frozenset({State.COMPILE_QUEUED, State.CANCELED}),
    State.EVAL_QUEUED: frozenset(
        {
            State.EVALUATING,
            State.COMPILED,
            State.NEW,
            State.EVALUATED,
            State.SEARCHING,
            State.ERRORED,
            State.CANCELED,
        }
    ),
    State.EVALUATING: frozenset(
        {State.EVALUATED, State.COMPILED, State.NEW, State.SEARCHING, State.ERRORED, State.CANCELED}
    ),
    State.EVALUATED: frozenset(),
    # `tuna retry`: to the step that failed
    State.ERRORED: frozenset({State.NEW, State.COMPILED, State.SEARCHING}),
    State.CANCELED: frozenset({State.NEW}),
}

#: States from which a job may be claimed for its current step; `compiled` after a last CPU step is
#: final
CLAIMABLE = {
    Resource.CPU: (State.NEW, State.SEARCHING),
    Resource.DEVICE: (State.COMPILED, State.NEW),
}

_QUEUED = {Resource.CPU: State.COMPILE_QUEUED, Resource.DEVICE: State.EVAL_QUEUED}
_RUNNING = {State.COMPILE_QUEUED: State.COMPILING, State.EVAL_QUEUED: State.EVALUATING}


class ForbiddenTransition(AssertionError):
    """A transition that the table does not have: a bug in Tuna."""


def check(old: State, new: State) -> State:
    """`new`, if the table allows it after `old`."""
    if new not in TRANSITIONS[old]:
        raise ForbiddenTransition(f"{old.value} -> {new.value}")
    return new


def is_open(state: State | str, resource: Resource) -> bool:
    """Whether a job in `state`, whose step runs on `resource`, is in flight or waits for that
    step."""
    return State(state) in IN_FLIGHT or State(state) in CLAIMABLE[resource]


def queued(resource: Resource) -> State:
    """The state of a job that is leased for a step on `resource`."""
    return _QUEUED[resource]


def running(state: State) -> State:
    """The state after a worker took a job in the queued `state`."""
    return _RUNNING[state]


def resource_in(state: State) -> Resource:
    """The resource that a job in flight is on, or waits for."""
    return Resource.CPU if state in (State.COMPILE_QUEUED, State.COMPILING) else Resource.DEVICE


def waiting(step: str, steps: tuple[str, ...], resource: Resource) -> State:
    """The state of a job that waits for `step`: `new` before its first step, `compiled` for a later
    device step."""
    if steps.index(step) == 0:
        return State.NEW
    return State.COMPILED if resource is Resource.DEVICE else State.SEARCHING


def done(resource: Resource) -> State:
    """The final state of a job whose last step ran on `resource`."""
    return State.EVALUATED if resource is Resource.DEVICE else State.COMPILED


def mermaid() -> str:
    """The transition table as a Mermaid state diagram."""
    return state_diagram(TRANSITIONS)


class ClaimedJob(NamedTuple):
    """A job whose next attempt is described: by a claim, or for a person who repeats it."""

    options: dict[str, Any]
    id: int
    session_id: int
    config_id: int
    solver_id: int
    steps: str  #: all steps, comma-separated; see `db.jobs.step_names`
    search_id: int | None
    round: int
    attempt: int
    isolate: bool
    avoid: str | None
    uncharged: int
    cause: str | None


class AttemptedJob(NamedTuple):
    """A job after an attempt: what a report is about, or what is released."""

    id: int
    session_id: int
    config_id: int
    solver_id: int
    search_id: int | None
    state: str
    step: str
    steps: str  #: all steps, comma-separated; see `db.jobs.step_names`
    attempt: int
    failures: int
    uncharged: int
    avoid: str | None  #: worker at which it failed last, if it is to be tried elsewhere
    workload: str | None
    chunk: str | None
    leased_at: str | None  #: UTC time of the claim in ISO form

    @property
    def leased_since(self) -> datetime | None:
        """The moment of its lease."""
        if self.leased_at is None:
            return None
        return datetime.fromisoformat(self.leased_at).replace(tzinfo=timezone.utc)


if __name__ == "__main__":
    print(mermaid())
