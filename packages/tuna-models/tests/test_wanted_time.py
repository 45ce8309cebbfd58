"""Tuning ends when the model takes no longer than is wanted, or cannot."""

from __future__ import annotations

import contextlib
from collections import deque
from types import SimpleNamespace
from typing import Any

import pytest

from tuna.coordinator.session_run import Progress, RunEvents
from tuna.workers.launch import RunStopped
from tuna_models.api import Ending, Latency, Reached
from tuna_models.api.tuning import _Tuning
from tuna_models.cli.tune import reached
from tuna_models.work.tuning_order import Budget, Wanted

WANTED = Latency(10.0)


class Scripted(_Tuning):
    """Builds whose times are given; a run of the workers does two of the jobs that wait."""

    def __init__(self, *times_ms: float, jobs: int = 4, least_ms: float = 1.0) -> None:
        self._times_ms = deque(times_ms)
        self._least_ms = least_ms
        self._waiting = deque(Wanted(number, "Tile", 1) for number in range(jobs))
        self._seen: list[Progress] = []
        self._budget = None
        self._started = 0.0
        self.ran = self.ordered = self.results = 0
        self.useful = True

    def _built(self, latency: Latency) -> Any:
        return SimpleNamespace(time_ms=self._times_ms.popleft())

    def _winners(self) -> Any:
        return {"results": self.results}

    def _forecast(self, built: Any, before: Any) -> tuple[float, float]:
        return built.time_ms - (self.results - before["results"]), self._least_ms

    def _order(self, built: Any) -> None:
        self.ordered += 1

    def _work_through(self, first: int) -> None:
        assert first == Budget.AHEAD
        self.ran += 1
        for _ in range(min(2, len(self._waiting))):
            self._waiting.popleft()
            self.results += self.useful
        self._seen.append(SimpleNamespace(unfinished=0))  # type: ignore[arg-type]


def test_what_is_known_may_do_without_a_trial() -> None:
    scene = Scripted(9.0)
    assert scene._meet(WANTED) == Reached(Ending.MET, 10.0, 9.0, 1.0)
    assert scene.ran == 0


def test_the_model_is_built_again_when_enough_should_be_known() -> None:
    scene = Scripted(12.0, 11.0, 10.0)
    assert scene._meet(WANTED) == Reached(Ending.MET, 10.0, 10.0, 1.0)
    assert (scene.ran, scene.ordered) == (2, 1)
    # it was built the second time with two results
    for scene.results, enough in ((2, False), (3, True)):
        assert scene._enough() is enough


@pytest.mark.parametrize(
    ("scene", "ending", "runs"),
    [
        (Scripted(12.0, least_ms=10.5), Ending.IMPOSSIBLE, 0),
        (Scripted(12.0, jobs=0, least_ms=12.0), Ending.DONE, 0),
        (Scripted(12.0, 11.9, 11.8, jobs=4), Ending.DONE, 2),
    ],
)
def test_tuning_ends_where_the_time_cannot_be_met_or_nothing_is_left(
    scene: Scripted, ending: Ending, runs: int
) -> None:
    found = scene._meet(WANTED)
    assert (found.ending, scene.ran) == (ending, runs)


def test_tuning_ends_with_the_budget_and_where_jobs_bring_nothing() -> None:
    late = Scripted(12.0)
    late._budget = Budget(1.0)
    assert late._meet(WANTED).ending is Ending.BUDGET
    useless = Scripted(12.0, 12.0, jobs=100)
    useless.useful = False
    assert useless._meet(WANTED).ending is Ending.DONE
    assert useless.ran == 1


def test_workers_stop_when_enough_is_known(monkeypatch: pytest.MonkeyPatch) -> None:
    scene, shown, mine = Scripted(), list[Progress](), deque([3, 3, 2])

    def progress(*_: object) -> Any:
        left = mine.popleft()
        return Progress({}, 3, left, 0)

    monkeypatch.setattr("tuna_models.api.tuning.progress", progress)
    monkeypatch.setattr("tuna_models.api.tuning.open_database", lambda: None)
    monkeypatch.setattr("tuna_models.api.tuning.reading", lambda _: contextlib.nullcontext())
    scene._session_id, scene._model = 1, SimpleNamespace(tag="t")  # type: ignore[assignment]
    scene._work = SimpleNamespace(events=RunEvents(shown.append))  # type: ignore[assignment]
    scene._load = lambda count: None  # type: ignore[method-assign]
    asked: list[int] = []
    scene._enough = lambda: bool(asked.append(1)) or len(asked) > 1
    whole = Progress({}, 3, 3, 0)
    scene._follow(whole)
    scene._follow(whole)
    assert len(asked) == 1, "nothing has ended since"
    with pytest.raises(RunStopped, match="should meet the wanted time"):
        scene._follow(whole)
    assert [one.unfinished for one in shown] == [3, 3, 2]


@pytest.mark.parametrize(
    ("found", "jobs", "said"),
    [
        (
            Reached(Ending.MET, 12.0, 11.5, 9.0),
            0,
            "12 ms are met by what was known, without a trial: the model takes 11.50 ms",
        ),
        (
            Reached(Ending.IMPOSSIBLE, 2.0, 11.5, 9.0),
            3,
            "2 ms are not met, after 3 jobs: by the estimates it takes 9.00 ms at least; the best"
            " so far takes 11.50 ms",
        ),
        (
            Reached(Ending.BUDGET, 2.0, 11.5, 1.0),
            1,
            "2 ms are not met, after 1 job: the time is over; the best so far takes 11.50 ms",
        ),
    ],
)
def test_the_command_says_how_it_ended(found: Reached, jobs: int, said: str) -> None:
    assert reached(found, jobs) == said
