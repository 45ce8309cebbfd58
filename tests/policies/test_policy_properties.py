"""What every policy keeps to, whatever the snapshot: queues are filled and not overfilled,
priorities hold, nobody starves."""

from __future__ import annotations

from collections import Counter

from hypothesis import given, settings
from hypothesis import strategies as st

from tuna.policies import POLICIES, OpenStep, SearchProgress, Share, Snapshot, StageKind, fair

#: Those that publish whatever fits.
FILLING = ("fair", "gradient", "shortest", "deadline", "fifo", "greedy", "bundled")
BY_PRIORITY = ("fair", "gradient", "shortest", "deadline")
QUEUES = ("cpu", "device")

_progress = st.none() | st.builds(
    SearchProgress,
    st.floats(0, 9),
    st.lists(st.floats(0.1, 9), min_size=1, max_size=6).map(tuple),
    st.integers(1, 20),
)
_step = st.builds(
    OpenStep,
    session_id=st.integers(1, 4),
    step=st.sampled_from(("propose", "build", "measure")),
    queue=st.sampled_from(QUEUES),
    priority=st.integers(0, 2),
    remaining=st.integers(0, 2),
    solver=st.sampled_from("ab"),
    ready=st.integers(1, 5),
    since_s=st.floats(0, 9),
    continues=st.booleans(),
    progress=_progress,
)
_by_queue = st.fixed_dictionaries({queue: st.integers(0, 6) for queue in QUEUES})
_of_session_and_queue = st.tuples(st.integers(1, 4), st.sampled_from(QUEUES))
_snapshots = st.builds(
    Snapshot,
    open=st.lists(_step, max_size=12),
    waiting=_by_queue,
    processes=_by_queue,
    bound=st.integers(1, 20),
    per_process=st.integers(1, 3),
    queued_per_process=st.dictionaries(st.sampled_from(QUEUES), st.integers(0, 2)),
    running=_by_queue,
    now_s=st.floats(0, 20),
    served=st.dictionaries(_of_session_and_queue, st.integers(0, 99), max_size=6),
    in_flight=st.dictionaries(
        st.tuples(st.integers(1, 4), st.sampled_from(("build", "measure"))), st.integers(0, 3)
    ),
    deadline_s=st.dictionaries(st.integers(1, 4), st.floats(0, 40)),
    left_s=st.dictionaries(_of_session_and_queue, st.floats(0, 99)),
    predicted_s=st.dictionaries(
        st.builds(StageKind, st.sampled_from(QUEUES), st.sampled_from("ab"), st.just("build")),
        st.floats(0, 9),
    ),
)


def _published(shares: list[Share]) -> Counter[int]:
    """Chunks by the identity of the step."""
    found: Counter[int] = Counter()
    for share in shares:
        assert share.chunks > 0
        found[id(share.step)] += share.chunks
    return found


def _open_in(snapshot: Snapshot, queue: str) -> list[OpenStep]:
    return [step for step in snapshot.open if step.queue == queue]


@settings(max_examples=60, deadline=None)
@given(snapshot=_snapshots)
def test_no_queue_is_overfilled_and_nothing_is_published_that_is_not_open(
    snapshot: Snapshot,
) -> None:
    for name, policy in POLICIES.items():
        published = _published(policy(snapshot))
        assert published.keys() <= {id(step) for step in snapshot.open}, name
        assert all(published[id(step)] <= (step.ready or 0) for step in snapshot.open), name
        for queue in QUEUES if name != "unsynchronised" else ():
            assert sum(published[id(step)] for step in _open_in(snapshot, queue)) <= snapshot.room(
                queue
            ), name


@settings(max_examples=60, deadline=None)
@given(snapshot=_snapshots)
def test_no_device_idles_while_work_for_it_is_open(snapshot: Snapshot) -> None:
    for name in FILLING:
        published = _published(POLICIES[name](snapshot))
        for queue in QUEUES:
            steps = _open_in(snapshot, queue)
            fits = min(snapshot.room(queue), sum(step.ready or 0 for step in steps))
            assert sum(published[id(step)] for step in steps) == fits, name


@settings(max_examples=60, deadline=None)
@given(snapshot=_snapshots)
def test_a_lower_priority_gets_what_the_higher_ones_leave(snapshot: Snapshot) -> None:
    for name in BY_PRIORITY:
        published = _published(POLICIES[name](snapshot))
        for queue in QUEUES:
            steps = _open_in(snapshot, queue)
            least = min((step.priority for step in steps if published[id(step)]), default=9)
            assert all(
                published[id(step)] == step.ready for step in steps if step.priority > least
            ), name


@settings(max_examples=30, deadline=None)
@given(snapshot=_snapshots)
def test_a_policy_is_a_function_of_the_snapshot(snapshot: Snapshot) -> None:
    before = repr(snapshot)
    for name, policy in POLICIES.items():
        assert policy(snapshot) == policy(snapshot), name
    assert repr(snapshot) == before


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
