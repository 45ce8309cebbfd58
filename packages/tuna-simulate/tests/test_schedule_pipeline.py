"""The benchmark of schedules: its searches take the same course through the real pipeline and
through the simulator."""

from __future__ import annotations

from collections import defaultdict

import pytest

from benchmarks import schedule_pipeline
from benchmarks.schedule import drawn, given
from benchmarks.simulated_device import STAGES
from tuna_simulate import jobs
from tuna_simulate.api import simulate

pytestmark = pytest.mark.service

#: For each search and stage, the rounds in the order in which they ended.
Order = dict[tuple[int, str], list[int]]


def in_simulation(
    durations: schedule_pipeline.Durations, look_ahead: int, monkeypatch: pytest.MonkeyPatch
) -> Order:
    order: Order = defaultdict(list)
    end = jobs.SimulatedJob.end

    def note(job: jobs.SimulatedJob, item: jobs.Item, now_s: float) -> object:
        order[job.line.session_id - 1, STAGES[item.stage]].append(item.round)
        return end(job, item, now_s)

    monkeypatch.setattr(jobs.SimulatedJob, "end", note)
    simulate(given(durations, look_ahead), "fair")
    return order


@pytest.mark.drill(only=True)
def test_every_round_passes_the_stages_in_the_order_of_the_simulator(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    rounds, look_ahead, scale = 3, 1, 2000
    durations = drawn(2, rounds, scale, seed=0)
    stages = schedule_pipeline.run(
        durations, "fair", scale=scale, look_ahead=look_ahead, late=False
    )
    order: Order = defaultdict(list)
    for one in stages:
        order[one.search, one.step].append(one.round)
    assert set(order) == {(search, stage) for search in range(2) for stage in STAGES}
    assert order == in_simulation(durations, look_ahead, monkeypatch)
    ended = {(one.search, one.round, one.step): one for one in stages}
    for (search, number, stage), one in ended.items():
        assert (
            one.ended_s - one.started_s >= durations[search][number][STAGES.index(stage)] - 0.01
        ), "it slept"
        if stage != STAGES[0]:
            assert one.started_s >= ended[search, number, STAGES[STAGES.index(stage) - 1]].ended_s
