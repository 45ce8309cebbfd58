"""Snapshots for tests of policies, and what every policy keeps to."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable
from dataclasses import replace
from typing import Any

from hypothesis import strategies as st

from tuna.coordinator.policies import Policy, Share, Snapshot
from tuna.jobs.open_steps import OpenStep, SearchProgress, StageKind

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
snapshots = st.builds(
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


def step(session_id: int, name: str = "build", **facts: Any) -> OpenStep:
    return OpenStep(
        session_id, name, facts.pop("queue", "cpu"), ready=facts.pop("ready", 9), **facts
    )


def order(policy: Policy, *steps: OpenStep, processes: int = 1, **facts: Any) -> list[int]:
    """The sessions in the order in which a single process is given to them, with nothing left of a
    step that was published."""
    snapshot = Snapshot(
        list(steps), {}, {"cpu": processes, "device": processes}, 99, per_process=1, **facts
    )
    found: list[int] = []
    while snapshot.open and (shares := policy(snapshot)):
        found.append(shares[0].step.session_id)
        snapshot = replace(
            snapshot, open=[one for one in snapshot.open if one is not shares[0].step]
        )
    return found


def published_by(shares: list[Share]) -> Counter[int]:
    """Return chunks by the identity of the step."""
    found: Counter[int] = Counter()
    for share in shares:
        assert share.chunks > 0
        found[id(share.step)] += share.chunks
    return found


def open_in(snapshot: Snapshot, queue: str) -> list[OpenStep]:
    return [step for step in snapshot.open if step.queue == queue]


def check_what_is_published(policies: Iterable[Policy], snapshot: Snapshot) -> None:
    """No queue is overfilled, and nothing is published that is not open."""
    for policy in policies:
        published = published_by(policy(snapshot))
        assert published.keys() <= {id(step) for step in snapshot.open}, policy.name
        assert all(published[id(step)] <= (step.ready or 0) for step in snapshot.open), policy.name
        for queue in QUEUES:
            assert sum(published[id(step)] for step in open_in(snapshot, queue)) <= snapshot.room(
                queue
            ), policy.name


def check_that_no_device_idles(policies: Iterable[Policy], snapshot: Snapshot) -> None:
    """Whatever is open and fits is published."""
    for policy in policies:
        published = published_by(policy(snapshot))
        for queue in QUEUES:
            steps = open_in(snapshot, queue)
            fits = min(snapshot.room(queue), sum(step.ready or 0 for step in steps))
            assert sum(published[id(step)] for step in steps) == fits, policy.name


def check_that_they_are_functions(policies: Iterable[Policy], snapshot: Snapshot) -> None:
    """Equal snapshots give equal shares, and none is changed."""
    before = repr(snapshot)
    for policy in policies:
        assert policy(snapshot) == policy(snapshot), policy.name
    assert repr(snapshot) == before
