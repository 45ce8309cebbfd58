"""The table of transitions."""

from __future__ import annotations

import itertools

import pytest

from tuna.jobs import states
from tuna.jobs.states import CLAIMABLE, TRANSITIONS
from tuna.vocabulary import IN_FLIGHT, Resource, State


def test_only_what_the_table_has_is_allowed() -> None:
    for old, new in itertools.product(State, State):
        if new in TRANSITIONS[old]:
            assert states.check(old, new) is new
        else:
            with pytest.raises(states.ForbiddenTransition):
                states.check(old, new)


def test_every_state_can_be_reached() -> None:
    reached, frontier = {State.NEW}, [State.NEW]
    while frontier:
        new = TRANSITIONS[frontier.pop()] - reached
        reached |= new
        frontier += new
    assert reached == set(State)


def test_what_is_done_stays_done_and_what_is_in_flight_can_come_back() -> None:
    assert TRANSITIONS[State.EVALUATED] == frozenset()
    for state in IN_FLIGHT:
        assert State.NEW in TRANSITIONS[state]
        assert State.ERRORED in TRANSITIONS[state]


def test_a_job_is_never_claimable_and_in_flight() -> None:
    assert not IN_FLIGHT & {state for claimable in CLAIMABLE.values() for state in claimable}
    assert State.COMPILED not in CLAIMABLE[Resource.CPU], "after a last CPU step a job is done"
