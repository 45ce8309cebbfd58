"""What is published next by default: a session's priority, then sessions in turn, within what a
queue may hold."""

from __future__ import annotations

import re
import sys

import pytest
from pydantic import ValidationError

from tuna import api
from tuna.cli.main import main
from tuna.coordinator.policies import POLICIES, Snapshot, fair
from tuna.errors import BadInput
from tuna.jobs.open_steps import OpenStep
from tuna.settings import Settings
from tuna.vocabulary import COMPARED_POLICIES, PUBLISHING_POLICIES

QUEUE = "compile.x"


def shares(
    *steps: OpenStep, waiting: int = 0, processes: int = 2, bound: int = 256
) -> list[tuple[int, str, int]]:
    snapshot = Snapshot(steps, {QUEUE: waiting}, {QUEUE: processes}, bound)
    return [(share.step.session_id, share.step.step, share.chunks) for share in fair(snapshot)]


def step(
    session_id: int, name: str = "build", *, priority: int = 0, remaining: int = 1
) -> OpenStep:
    return OpenStep(session_id, name, QUEUE, priority, remaining)


@pytest.mark.parametrize(
    ("processes", "waiting", "bound", "published"),
    [
        (2, 0, 256, 4),
        (2, 3, 256, 1),
        (2, 4, 256, 0),
        (2, 9, 256, 0),
        (0, 0, 256, 4),
        (1, 0, 256, 2),
        (200, 0, 256, 256),
    ],
)
def test_two_chunks_wait_for_each_live_process_and_some_where_there_is_none(
    processes: int, waiting: int, bound: int, published: int
) -> None:
    found = shares(step(1), waiting=waiting, processes=processes, bound=bound)
    assert sum(chunks for *_, chunks in found) == published


def test_a_sessions_priority_comes_before_all() -> None:
    assert shares(step(1, "last", remaining=0), step(2, priority=1), step(3, priority=9)) == [
        (3, "build", 4)
    ]


def test_later_steps_of_a_session_come_before_earlier_ones() -> None:
    assert shares(step(1), step(1, "find", remaining=0), step(2)) == [
        (1, "find", 2),
        (2, "build", 2),
    ]


def test_sessions_take_turns_and_the_one_that_waited_longest_is_first() -> None:
    assert shares(step(3), step(1), step(2), processes=2) == [
        (3, "build", 2),
        (1, "build", 1),
        (2, "build", 1),
    ]
    assert shares(step(3), step(1), waiting=3) == [(3, "build", 1)]


def test_each_queue_is_filled_for_itself() -> None:
    other = OpenStep(1, "measure", "eval.y")
    snapshot = Snapshot([step(1, priority=9), other], {}, {QUEUE: 1, "eval.y": 3}, 5)
    assert {(share.step.queue, share.chunks) for share in fair(snapshot)} == {
        (QUEUE, 2),
        ("eval.y", 5),
    }


def test_policies_for_comparisons_are_refused_where_something_is_published(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """They need to know what is in flight, which a coordinator does not count."""
    assert {*PUBLISHING_POLICIES} - {"auto"} == {*POLICIES}
    for name in COMPARED_POLICIES:
        said = f"is for comparisons alone: `tuna simulate --policy {name}`"
        with pytest.raises(ValidationError, match=re.escape(said)):
            Settings(policy=name)  # type: ignore[arg-type]
        with pytest.raises(BadInput, match=name):
            api.run(1, policy=name)
        monkeypatch.setattr(sys, "argv", ["tuna", "run", "--session-id", "1", "--policy", name])
        with pytest.raises(SystemExit):
            main()
        assert said in capsys.readouterr().err
