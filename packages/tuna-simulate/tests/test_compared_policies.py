"""What each policy that is compared prefers, in the smallest snapshots, and what all of them
keep to."""

from __future__ import annotations

from hypothesis import given, settings
from policy_snapshots import (
    check_that_no_device_idles,
    check_that_they_are_functions,
    check_what_is_published,
    order,
    snapshots,
    step,
)

from tuna.coordinator.policies import Snapshot
from tuna.vocabulary import COMPARED_POLICIES
from tuna_simulate.comparison import (
    bundled,
    fifo,
    greedy,
    sequential,
    synchronous,
    unsynchronised,
)
from tuna_simulate.policies import COMPARED


def test_the_core_knows_the_names_of_those_that_it_refuses() -> None:
    assert tuple(policy.name for policy in COMPARED) == COMPARED_POLICIES


@settings(max_examples=60, deadline=None)
@given(snapshot=snapshots)
def test_compared_policies_keep_to_the_snapshot(snapshot: Snapshot) -> None:
    check_what_is_published([one for one in COMPARED if one is not unsynchronised], snapshot)
    check_that_no_device_idles([fifo, greedy, bundled], snapshot)
    check_that_they_are_functions(COMPARED, snapshot)


def test_fifo_serves_what_waits_longest_and_bundled_what_goes_on() -> None:
    steps = step(1, since_s=3), step(2, since_s=1), step(3, since_s=5, continues=True)
    assert order(fifo, *steps) == [2, 1, 3]
    assert order(bundled, *steps) == [3, 2, 1]


def test_greedy_goes_on_then_takes_the_next_session_after_the_one_served_last() -> None:
    steps = step(1), step(2), step(3), step(4)
    assert order(greedy, *steps, served={(2, "cpu"): 5, (4, "cpu"): 3}) == [3, 4, 1, 2]
    assert order(greedy, *steps, step(5, continues=True), served={(2, "cpu"): 5})[0] == 5


def test_sequential_waits_for_the_session_that_is_in_flight() -> None:
    assert order(sequential, step(2), step(3)) == [2, 3]
    assert order(sequential, step(2), step(3), in_flight={(1, "measure"): 1}) == []
    assert order(sequential, step(2), step(3), in_flight={(1, "measure"): 0}) == [2, 3]


def test_synchronous_starts_one_step_at_a_time() -> None:
    steps = step(1, "build", remaining=1), step(2, "measure", queue="device")
    assert order(synchronous, *steps) == [1, 2]
    assert order(synchronous, *steps, in_flight={(3, "build"): 1}) == [1]
    assert order(synchronous, *steps, in_flight={(3, "build"): 1, (3, "measure"): 1}) == []


def test_unsynchronised_publishes_all_at_once() -> None:
    shares = unsynchronised(Snapshot([step(1, since_s=2), step(2)], {}, {"cpu": 1}, 1, 1))
    assert [(share.step.session_id, share.chunks) for share in shares] == [(2, 9), (1, 9)]
