"""A contest of candidates: what is measured of whom, and who wins by the times in fresh
processes."""

from __future__ import annotations

import statistics
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from tuna.libraries.items import Trial
from tuna.libraries.results import is_close

#: Maximum of finalists, of those close to the best
FINALISTS = 4
#: Function that times trials in one fresh process, for up to so many seconds each; returns by index
#: their timings, or the trial that failed there. Empty: no process could be started.
Again = Callable[[Sequence[Trial], float], Mapping[int, Mapping[str, Any] | Trial]]


@dataclass(frozen=True)
class Budgets:
    """Most seconds for the repeats of one candidate in a process, and numbers of processes."""

    candidate_s: float = 1.0
    finalist_s: float = 0.5
    #: mean number of fresh processes for a finalist: a slower one leaves its part to the others
    finalist_processes: int = 2
    rival_s: float = 0.15
    #: number of fresh processes for a rival; more, because the difference between two rivals is
    #: mostly where their buffers lie
    rival_processes: int = 5
    #: seconds for measuring the first good candidate once more after the last one, whose change is
    #: a drift; 0: the probes tell the drift
    first_again_s: float = 0.0


@dataclass(frozen=True)
class Contest:
    """Candidates that are measured, by their index."""

    jobs: Mapping[int, Mapping[str, Any]]  #: jobs of the candidates by index, for one config
    limit_s: float  #: seconds for measuring one candidate
    start_s: float  #: seconds for what comes before the first candidate
    #: earlier times of rivals by index, whose answers are known to be right; None: no rivals
    known_ms: Mapping[int, float] | None = None
    #: maximum of finalists; 0: a quick look, after which nothing is measured again, because
    #: something else decides
    finalists: int = FINALISTS
    #: best time of earlier measurements; candidates far from it do not become finalists
    best_ms: float | None = None
    budgets: Budgets = Budgets()
    #: true if that time is noisy: then what is slower than `best_ms` may replace it
    best_noisy: bool = False


class Standings:
    """The trials of a contest, and the timings by which they are judged."""

    def __init__(self, contest: Contest, again: Again) -> None:
        self._contest, self._measure_again = contest, again
        self.trials: dict[int, Trial] = {}  #: trials by index, in the order in which they came
        #: timings by index: of the first process until fresh ones have measured it
        self.timings: dict[int, list[Mapping[str, Any]]] = {}
        #: indices of the candidates that were measured in fresh processes
        self._fresh: set[int] = set()

    def choose(self) -> None:
        """Measure the finalists and leave one trial eligible, or none: see `_winner`."""
        timed = [index for index in self.timings if not self.trials[index].ended_early]
        winner = self._winner(timed)
        for index, trial in self.trials.items():
            self.trials[index] = trial.model_copy(update={"eligible": index == winner})

    def is_noisy(self, index: int) -> bool:
        """Whether a candidate was not measured on a quiet core in half of its processes or more, or
        is the winner of a round whose device could not be measured on in a fresh process.

        The median over processes lies between times of quiet ones where these are more than half.
        """
        timings = self.timings.get(index, ())
        is_held = self._contest.finalists and self.trials[index].eligible
        return 2 * _disturbed(timings) >= len(timings) or bool(is_held and index not in self._fresh)

    def again(self, indices: Sequence[int], budget_s: float) -> list[int]:
        """Measure candidates in one fresh process, interleaved and loaded in the reverse order;
        returns those that did not fail, in that order."""
        order = list(reversed(indices))
        found = self._measure_again([self.trials[index] for index in order], budget_s)
        for index, timing in found.items():
            if isinstance(timing, Trial):
                self.trials[index] = timing
                self.timings.pop(index, None)
                continue
            before = self.timings[index] if index in self._fresh else []
            self._fresh.add(index)
            self.timings[index] = [*before, timing]
            self.trials[index] = with_timings(self.trials[index], self.timings[index])
        return [index for index in order if self.trials[index].cause is None]

    def _winner(self, indices: Sequence[int]) -> int | None:
        """The one of the fastest of these that is the fastest in fresh processes; None if all fail
        there or are slower than the best of earlier rounds.

        After each process the slower half is out. So four take as many measurements as in two
        processes each, and the winner's time is from four, most of which chose nobody: the fastest
        of times that differ by chance is too short.
        """
        budgets, timed = self._contest.budgets, self._by_time(indices)
        best_ms = min(
            (ms for ms in (self._contest.best_ms, *map(self._ms, timed[:1])) if ms is not None),
            default=0.0,
        )
        close = [index for index in timed if is_close(self._ms(index), best_ms)]
        finalists = close[: self._contest.finalists]
        measurements = budgets.finalist_processes * len(finalists)
        while finalists and measurements >= len(finalists):
            measurements -= len(finalists)
            left = self._by_time(self.again(finalists, budgets.finalist_s))
            finalists = [index for index in left[: (len(left) + 1) // 2] if self._could_win(index)]
        if finalists and self._is_undecided(finalists[0]):
            finalists = self.again(finalists[:1], budgets.finalist_s)
        if finalists:
            return finalists[0]
        good = [index for index in timed if self.trials[index].cause is None]
        return self._winner(good) if len(good) < len(timed) else None

    def _could_win(self, index: int) -> bool:
        """Whether it is faster than the best of earlier rounds, so far."""
        best_ms = None if self._contest.best_noisy else self._contest.best_ms
        return best_ms is None or self._ms(index) < best_ms

    def _is_undecided(self, index: int) -> bool:
        """Whether one more process says if it is noisy."""
        return 2 * _disturbed(self.timings[index]) == len(self.timings[index])

    def _by_time(self, indices: Iterable[int]) -> list[int]:
        return sorted(indices, key=lambda index: (self._ms(index), index))

    def _ms(self, index: int) -> float:
        time_ms = self.trials[index].time_ms
        assert time_ms is not None, "it was timed"
        return time_ms


def with_timings(trial: Trial, timings: Sequence[Mapping[str, Any]]) -> Trial:
    """Return the trial with the timings of its processes: buffers come to lie elsewhere in each, so
    each has one vote."""
    clocks = {timing["clock"] for timing in timings}
    update = {
        "times_ms": tuple(time_ms for timing in timings for time_ms in timing["times_ms"]),
        "time_ms": statistics.median(timing["time_ms"] for timing in timings),
        "low_ms": min(timing["low_ms"] for timing in timings),
        "high_ms": max(timing["high_ms"] for timing in timings),
        "clock": "cpu" if "cpu" in clocks else min(clocks),
    }
    return trial.model_copy(update=update)


def _disturbed(timings: Sequence[Mapping[str, Any]]) -> int:
    return sum(timing["noisy"] for timing in timings)
