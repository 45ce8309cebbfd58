"""What every policy keeps to, whatever the snapshot: queues are filled and not overfilled,
priorities hold, nobody starves."""

from __future__ import annotations

from collections import Counter

from hypothesis import given, settings
from hypothesis import strategies as st
from policy_snapshots import (
    QUEUES,
    check_that_no_device_idles,
    check_that_they_are_functions,
    check_what_is_published,
    open_in,
    published_by,
    snapshots,
)

from tuna.coordinator.policies import POLICIES, Snapshot, fair
from tuna.jobs.open_steps import OpenStep


@settings(max_examples=60, deadline=None)
@given(snapshot=snapshots)
def test_no_queue_is_overfilled_and_nothing_is_published_that_is_not_open(
    snapshot: Snapshot,
) -> None:
    check_what_is_published(POLICIES.values(), snapshot)


@settings(max_examples=60, deadline=None)
@given(snapshot=snapshots)
def test_no_device_idles_while_work_for_it_is_open(
    snapshot: Snapshot,
) -> None:
    check_that_no_device_idles(POLICIES.values(), snapshot)


@settings(max_examples=60, deadline=None)
@given(snapshot=snapshots)
def test_a_policy_is_a_function_of_the_snapshot(
    snapshot: Snapshot,
) -> None:
    check_that_they_are_functions(POLICIES.values(), snapshot)


@settings(max_examples=60, deadline=None)
@given(snapshot=snapshots)
def test_a_lower_priority_gets_what_the_higher_ones_leave(snapshot: Snapshot) -> None:
    for name in POLICIES:
        published = published_by(POLICIES[name](snapshot))
        for queue in QUEUES:
            steps = open_in(snapshot, queue)
            least = min((step.priority for step in steps if published[id(step)]), default=9)
            assert all(
                published[id(step)] == step.ready for step in steps if step.priority > least
            ), name


@settings(max_examples=25, deadline=None)
@given(
    steps_of_round=st.lists(st.integers(1, 4), min_size=2, max_size=5),
    processes=st.integers(1, 3),
    busy_elsewhere=st.integers(0, 3),
)
def test_no_session_of_equal_priority_starves_under_fair(
    steps_of_round: list[int], processes: int, busy_elsewhere: int
) -> None:
    """Sessions with endless rounds, each of which keeps its process for so many steps; one is often
    served elsewhere, too."""
    served: dict[tuple[int, str], int] = {}
    turns: Counter[int] = Counter()
    goes_on: list[tuple[int, int]] = []  # session, steps that follow in the same queue
    number = 0
    for _ in range(20 * sum(steps_of_round)):
        fresh = [
            OpenStep(n, "first", "cpu", remaining=length, ready=9)
            for n, length in enumerate(steps_of_round)
        ]
        more = [
            OpenStep(n, "next", "cpu", remaining=left, ready=1, continues=True)
            for n, left in goes_on
        ]
        (share,) = fair(
            Snapshot(more + fresh, {"cpu": processes - 1}, {"cpu": processes}, 99, 1, served=served)
        )
        n, left = share.step.session_id, share.step.remaining
        if share.step.continues:
            goes_on.remove((n, left))
        else:
            turns[n] += 1
        if left > 1:
            goes_on.append((n, left - 1))
        number += 1 + busy_elsewhere
        served[n, "cpu"] = number
        served[0, "device"] = number + busy_elsewhere
    assert max(turns.values()) - min(turns[n] for n in range(len(steps_of_round))) <= 1
