"""What an item's candidates are measured in: fresh processes for finalists, and again after drift
what could be the best."""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest

from tuna.libraries.contest import FINALISTS, Budgets, Contest
from tuna.libraries.items import Trial
from tuna.libraries.measurement import DeviceHeld, Measurement
from tuna.sandbox.processes import ChildCrashed


class Machine:
    """Answers as the eval child does: each candidate has a time, and each process its own
    factor."""

    def __init__(
        self, times_ms: Sequence[float], probes: Sequence[float] = (), **ways: Any
    ) -> None:
        self.times_ms, self.ways = times_ms, ways
        given = probes or (100.0,)
        self._probes = itertools.chain(given, itertools.repeat(given[-1]))
        self.calls: list[str] = []
        self.bests: list[float | None] = []
        self.budgets_s: list[float] = []
        self.measured_paths: list[int] = []
        self.processes = 0
        self.fresh_runs: list[list[int]] = []  #: candidates of each fresh process

    def timing(self, time_ms: float, clock: str = "wall") -> dict[str, Any]:
        facts = {
            "times_ms": [time_ms] * 3,
            "time_ms": time_ms,
            "low_ms": time_ms * 0.99,
            "high_ms": time_ms * 1.01,
        }
        return {**facts, "clock": clock, "noisy": clock == "cpu"}

    def time_ms(self, index: int) -> float:
        """The second time that it is measured, another one where that was given."""
        later_ms = self.ways.get("later_ms")
        return float(
            (later_ms if later_ms and self.measured_paths.count(index) > 1 else self.times_ms)[
                index
            ]
        )

    def clean(self, op: str, timeout_s: float, **arguments: Any) -> dict[str, Any]:
        return self.shared(op, timeout_s, **arguments)

    def shared(self, op: str, timeout_s: float, **arguments: Any) -> dict[str, Any]:
        self.calls.append(op)
        if op == "probe":
            source = self.ways.get("source", "fma")
            return {"gflops": next(self._probes), "source": source, "copy_s": 1e-5}
        if op == "measure":
            self.budgets_s.append(arguments["budget_s"])
            self.bests.append(arguments["best_ms"])
            index = int(Path(arguments["path"]).name)
            self.measured_paths.append(index)
            time_ms = self.time_ms(index)
            timing = self.timing(time_ms, self.ways.get("clock", "wall"))
            best_ms = arguments["best_ms"]
            return {
                "error": 0.0,
                "timing": timing,
                "ended_early": best_ms is not None and time_ms > 3 * best_ms,
                "parts": {},
            }
        return {"arrays": []}

    def fresh(self, op: str, timeout_s: float, **arguments: Any) -> dict[str, Any]:
        self.processes += 1
        indices = [int(Path(path).name) for path in arguments["paths"]]
        self.fresh_runs.append(indices)
        if self.ways.get("held"):
            raise DeviceHeld
        if set(self.ways.get("dies", ())) & set(indices):
            raise ChildCrashed("the child ended with SIGSEGV", "")
        factor = self.ways.get("placement", {})
        times_ms = [self.time_ms(index) * factor.get(index, 1.0) for index in indices]
        clock = (
            "cpu"
            if self.processes in self.ways.get("disturbed", ())
            else self.ways.get("clock", "wall")
        )
        return {"timings": [self.timing(time_ms, clock) for time_ms in times_ms]}

    def measured(self, highest: float = 0.0) -> Any:
        paths = {index: Path(f"/{index}") for index in range(len(self.times_ms))}
        known_ms = dict(enumerate(self.times_ms)) if self.ways.get("rivals") else None
        finalists = self.ways.get("finalists", FINALISTS)
        jobs = {index: {"config": {}} for index in paths}
        budgets = self.ways.get("budgets", Budgets())
        best_ms = self.ways.get("best_ms")
        facts = (finalists, best_ms, budgets, self.ways.get("best_noisy", False))
        contest = Contest(jobs, 1, 1, known_ms, *facts)
        return Measurement(self, contest, paths, Path("/inputs")).run(highest)


def best(trials: Sequence[Trial]) -> int:
    (winner,) = (trial.index for trial in trials if trial.eligible)
    return winner


def test_the_pick_is_by_the_median_over_processes() -> None:
    """Candidate 0 was lucky in the first process alone."""
    machine = Machine([10.0, 10.5, 20.0], placement={0: 1.3})
    found = machine.measured()
    assert best(found.trials) == 1
    assert [round(trial.time_ms, 1) for trial in found.trials] == [13.0, 10.5, 20.0]
    assert (round(found.trials[0].low_ms, 1), round(found.trials[0].high_ms, 1)) == (12.9, 13.1)
    assert [len(trial.times_ms) for trial in found.trials] == [3, 9, 3]
    assert machine.processes == 3
    assert machine.bests == [None, 10.0, 10.0]
    assert not found.noisy


def test_the_slower_half_of_the_finalists_is_out_after_each_process() -> None:
    """Eight measurements, as of four in two processes each; the fifth was the fastest in the
    process that selects."""
    machine = Machine([10.0, 10.1, 10.2, 10.3, 9.9, 10.4], placement={4: 1.1})
    found = machine.measured()
    assert machine.fresh_runs == [[2, 1, 0, 4], [1, 0], [0], [0]]
    assert [trial.eligible for trial in found.trials] == [True, *[False] * 5]
    assert [len(trial.times_ms) for trial in found.trials] == [12, 6, 3, 3, 3, 3]
    assert [round(trial.time_ms, 2) for trial in found.trials] == [
        10.0, 10.1, 10.2, 10.3, 10.89, 10.4,
    ]  # fmt: skip


def test_a_candidate_alone_has_the_time_of_two_fresh_processes() -> None:
    machine = Machine([10.0], placement={0: 1.1})
    (trial,) = machine.measured().trials
    assert (trial.time_ms, trial.eligible) == (pytest.approx(11.0), True)
    assert (machine.fresh_runs, len(trial.times_ms)) == ([[0], [0]], 6)


@pytest.mark.parametrize(("disturbed", "runs", "noisy"), [((1,), 3, False), ((1, 2), 2, True)])
def test_where_half_of_the_winners_processes_were_disturbed_one_more_decides(
    disturbed: tuple[int, ...], runs: int, noisy: bool
) -> None:
    machine = Machine([10.0], disturbed=disturbed)
    assert (machine.measured().noisy, machine.processes) == (noisy, runs)


def test_where_all_finalists_crash_in_fresh_processes_the_next_ones_are_measured() -> None:
    machine = Machine([10.0, 10.1, 10.2, 10.3, 13.5, 30.9], dies=[0, 1, 2, 3])
    found = machine.measured()
    assert best(found.trials) == 4, "and not one that was run twice, since it seemed hopeless"
    assert len(found.trials[4].times_ms) == 6


@pytest.mark.parametrize(
    ("best_ms", "best_noisy", "winner", "processes"),
    [(10.2, False, 0, 3), (9.8, False, None, 1), (9.8, True, 0, 3)],
)
def test_what_no_finalist_beats_stays_the_best_after_one_process(
    best_ms: float, best_noisy: bool, winner: int | None, processes: int
) -> None:
    """A quiet one may replace a noisy one that is a little faster."""
    machine = Machine([10.0, 10.5], best_ms=best_ms, best_noisy=best_noisy)
    found = machine.measured()
    assert [t.index for t in found.trials if t.eligible] == ([] if winner is None else [winner])
    assert (machine.processes, found.noisy) == (processes, False)


def test_what_cannot_be_measured_again_wins_noisy() -> None:
    """A candidate holds the device, so that there is no fresh process."""
    found = Machine([10.0, 10.5], held=True).measured()
    assert (best(found.trials), found.noisy) == (0, True)


def test_what_is_far_slower_than_the_best_of_earlier_rounds_is_marked_and_no_finalist() -> None:
    machine = Machine([10.0, 31.0, 9.0, 29.0], best_ms=3.2)
    found = machine.measured()
    assert [trial.ended_early for trial in found.trials] == [True, True, False, True]
    assert machine.processes == 0


def test_a_quick_look_measures_nothing_again() -> None:
    machine = Machine([10.0, 10.5], probes=(100.0, 50.0), finalists=0)
    found = machine.measured()
    assert [trial.time_ms for trial in found.trials] == [10.0, 10.5]
    assert (machine.processes, machine.calls.count("measure"), found.noisy) == (0, 2, True)


def test_a_finalist_that_crashes_in_a_fresh_process_fails_alone() -> None:
    machine = Machine([10.0, 10.5, 10.4], dies=[0])
    found = machine.measured()
    assert [trial.cause and trial.cause.value for trial in found.trials] == [
        "run_error",
        None,
        None,
    ]
    assert best(found.trials) == 2


@pytest.mark.parametrize(
    ("probes", "highest", "rounds", "noisy"),
    [
        ((100.0, 99.0), 0.0, 1, False),
        ((100.0, 90.0, 99.0, 99.0), 0.0, 2, False),  # the second round was quiet
        ((100.0, 90.0, 80.0, 70.0), 0.0, 2, True),
        ((80.0,), 100.0, 1, True),  # throttled all the time
    ],
)
def test_what_drifts_is_measured_again_once_and_marked_if_that_does_not_help(
    probes: tuple[float, ...], highest: float, rounds: int, noisy: bool
) -> None:
    machine = Machine([10.0, 11.0], probes)
    found = machine.measured(highest)
    assert machine.calls.count("measure") == 2 * rounds
    assert found.noisy is noisy
    assert found.drift is not None
    assert (found.drift > 0.05) == (noisy and rounds == 2)


def test_what_cannot_be_the_best_keeps_its_time_after_drift() -> None:
    machine = Machine([10.0, 12.9, 13.1, 29.0], probes=(100.0, 92.0, 100.0, 100.0))
    found = machine.measured()
    assert machine.measured_paths == [0, 1, 2, 3, 0, 1]
    assert [trial.time_ms for trial in found.trials] == [10.0, 12.9, 13.1, 29.0]
    assert (found.noisy, found.drift) == (False, 0.0)


@pytest.mark.parametrize(("best_ms", "again"), [(7.6, []), (7.8, [0])])
def test_after_drift_nothing_is_measured_again_that_an_earlier_round_beats(
    best_ms: float, again: list[int]
) -> None:
    machine = Machine([10.0, 11.9], probes=(100.0, 92.0, 100.0, 100.0), best_ms=best_ms)
    found = machine.measured()
    assert machine.measured_paths == [0, 1, *again]
    assert found.noisy is not bool(again)


def test_the_more_a_device_drifts_the_more_is_measured_again() -> None:
    machine = Machine([10.0, 20.0, 40.0, 22.0], probes=(100.0, 66.0, 100.0, 100.0))
    machine.measured()
    assert machine.measured_paths == [0, 1, 2, 3, 0, 1, 3]


def test_a_candidate_that_was_not_measured_again_does_not_win_for_that() -> None:
    """The device became slower, steadily: what was close takes longer than what was not measured
    again."""
    machine = Machine([10.0, 13.1], probes=(100.0, 92.0, 100.0, 100.0), later_ms=[13.2, 16.0])
    found = machine.measured()
    assert machine.measured_paths == [0, 1, 0]
    assert [trial.time_ms for trial in found.trials] == [13.2, 13.1]
    assert (best(found.trials), found.noisy) == (0, False)


def test_a_winner_by_cpu_time_is_noisy_and_says_so() -> None:
    found = Machine([10.0], clock="cpu").measured()
    assert (found.noisy, found.trials[0].clock) == (True, "cpu")


@pytest.mark.parametrize(("disturbed", "noisy"), [((1,), False), ((1, 2), True)])
def test_a_result_is_noisy_when_half_of_its_processes_were(
    disturbed: tuple[int, ...], noisy: bool
) -> None:
    """The median of three lies between two times of quiet processes."""
    found = Machine([10.0, 10.5], disturbed=disturbed).measured()
    assert found.noisy is noisy


def test_rivals_are_measured_in_fresh_processes_alone() -> None:
    machine = Machine([10.0, 10.5, 40.0], rivals=True, placement={0: 1.3})
    found = machine.measured()
    assert (machine.processes, machine.calls.count("measure")) == (Budgets.rival_processes, 0)
    assert [round(trial.time_ms, 1) for trial in found.trials] == [13.0, 10.5, 40.0]
    assert [len(trial.times_ms) for trial in found.trials] == [3 * Budgets.rival_processes] * 3
    assert not found.noisy
    crashed = Machine([10.0, 10.5], rivals=True, dies=[1]).measured()
    assert [trial.cause and trial.cause.value for trial in crashed.trials] == [None, "run_error"]


def test_probes_say_nothing_of_a_device_with_a_clock_of_its_own() -> None:
    machine = Machine([10.0], (100.0, 50.0), clock="own")
    found = machine.measured()
    assert (found.noisy, found.drift, found.trials[0].clock) == (False, None, "own")
    assert machine.calls.count("measure") == 1


def test_probes_of_the_device_itself_tell_its_drift() -> None:
    machine = Machine([10.0], (100.0, 50.0), clock="own", source="device")
    found = machine.measured()
    assert (found.noisy, found.drift) == (False, 0.0), "the second round was quiet"
    assert machine.calls.count("measure") == 2


@pytest.mark.parametrize(("later_ms", "drift"), [(10.0, 0.0), (10.4, 0.04)])
def test_the_first_candidate_is_measured_again_where_budgets_say_so(
    later_ms: float, drift: float
) -> None:
    budgets = Budgets(candidate_s=0.3, first_again_s=0.1)
    ways = {"clock": "own", "source": "device", "later_ms": [later_ms, 20.0]}
    machine = Machine([10.0, 20.0], budgets=budgets, **ways)
    found = machine.measured()
    assert (machine.measured_paths, machine.budgets_s) == ([0, 1, 0], [0.3, 0.3, 0.1])
    assert found.drift == pytest.approx(drift)
    assert found.trials[0].index == 0


def test_numbers_of_fresh_processes_are_the_librarys() -> None:
    budgets = Budgets(finalist_processes=1, rival_processes=3)
    for rivals, processes in ((False, 1), (True, 3)):
        machine = Machine([10.0, 10.5], rivals=rivals, budgets=budgets)
        machine.measured()
        assert machine.processes == processes
