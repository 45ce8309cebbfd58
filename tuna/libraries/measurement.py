"""Measures the candidates of one item, between two probes: each one, then the best of them again in
fresh processes.

The finals of a config consist of the second part alone, with the winners of its solvers.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Protocol

from tuna.libraries.contest import Contest, Standings, with_timings
from tuna.libraries.items import Trial, tail
from tuna.libraries.results import CLOSE
from tuna.sandbox.processes import ChildFault, ChildGarbled, ChildTimeout
from tuna.vocabulary import Cause

#: Drift above which what could be the best is measured again, once; a result that drifts still is
#: noisy
_DRIFT = 0.05
#: Part of the highest peak that this worker has seen, below which a result is noisy too: the device
#: was throttled
_THROTTLED = 0.9
#: Source of a probe that asked the device; other probes do not tell about a device with a clock of
#: its own
_OF_DEVICE = "device"

Call = Callable[..., dict[str, Any]]


class DeviceGone(Exception):
    """The device vanished, which is not the fault of what was measured."""


class DeviceHeld(Exception):
    """A candidate holds the device, so that no other can be measured: what is known of them
    stays."""


@dataclass(frozen=True)
class MeasuredItem:
    """The trials of an item, and how quiet the device was."""

    trials: tuple[Trial, ...]
    noisy: bool = False  #: true if the best was measured on a device that was not quiet
    drift: float | None = None
    peak_gflops: float | None = None
    peak_source: str = ""


class Calls(Protocol):
    """The calls of `measuring_processes.MeasuringProcesses`, by what has run in the one that
    answers."""

    def clean(self, op: str, timeout_s: float, **arguments: Any) -> dict[str, Any]:
        """No candidate ever."""

    def shared(self, op: str, timeout_s: float, **arguments: Any) -> dict[str, Any]:
        """The item's candidates, one after the other."""

    def fresh(self, op: str, timeout_s: float, **arguments: Any) -> dict[str, Any]:
        """Nothing before this call."""


class Measurement:
    """Measures a contest."""

    def __init__(
        self, calls: Calls, contest: Contest, paths: Mapping[int, Path], inputs: Path
    ) -> None:
        """`paths` of the candidates by their index; `inputs`: a file for the inputs, which the
        caller removes."""
        self._calls, self.contest = calls, contest
        self._arrays: Any = None  #: arrays of the file `inputs`, once it is written
        self._paths, self._inputs = paths, inputs

    def run(self, highest_gflops: float = 0.0) -> MeasuredItem:
        """A trial for each candidate, in their order; `highest_gflops`: the highest peak seen on
        this device."""
        found = self._between_probes(list(self._paths), highest_gflops)
        if not self.contest.finalists or found.drift is None or found.drift <= _DRIFT:
            return found
        close = self._close(found, found.drift)
        if not close:
            return found
        again = self._between_probes(close, highest_gflops)
        if again.drift is None or (again.noisy, again.drift) >= (found.noisy, found.drift):
            return found
        if _has_winner(found.trials) and not _has_winner(again.trials):
            return found
        new = {trial.index: trial for trial in again.trials}
        trials = (new.get(t.index, t.model_copy(update={"eligible": False})) for t in found.trials)
        return replace(again, trials=tuple(trials))

    def _close(self, found: MeasuredItem, drift: float) -> list[int]:
        """Which of the candidates could be the best, at whatever speed of the device each of them
        was measured."""
        if self.contest.known_ms is not None:  # each of the rivals is the winner of its solver
            return [trial.index for trial in found.trials if trial.cause is None]
        best = _best(found.trials)
        both = (self.contest.best_ms, best.time_ms if best else None)
        known = [ms for ms in both if ms is not None]
        limit_ms = max(CLOSE, (1 + drift) ** 2) * min(known, default=0.0)
        return [
            trial.index
            for trial in found.trials
            if trial.time_ms is not None and trial.time_ms <= limit_ms
        ]

    def _between_probes(self, indices: Sequence[int], highest_gflops: float) -> MeasuredItem:
        before = self._probe()
        standings, drift = self._measured(indices)
        trials = tuple(standings.trials.values())
        after = self._probe()
        best = _best(trials)
        noisy = best is not None and standings.is_noisy(best.index)
        if before is None or after is None:
            return MeasuredItem(trials, noisy)
        top = max(before, after, key=lambda probe: float(probe["gflops"]))
        peak = float(top["gflops"])
        if best is None or (best.clock == "own" and top["source"] != _OF_DEVICE):
            return MeasuredItem(trials, noisy, None, peak, top["source"])
        changes = [_change(before[name], after[name]) for name in ("gflops", "copy_s")]
        drift = max(*changes, drift)
        noisy = noisy or drift > _DRIFT or peak < _THROTTLED * highest_gflops
        return MeasuredItem(trials, noisy, drift, peak, top["source"])

    def _measured(self, indices: Sequence[int]) -> tuple[Standings, float]:
        """The standings, with one trial eligible unless this is a quick look, and the change of the
        first good candidate's time, where it was measured again."""
        standings, budgets = Standings(self.contest, self.again), self.contest.budgets
        if self.contest.known_ms is not None:  # rivals: in fresh processes alone
            for index in indices:
                trial = Trial(index=index, time_ms=self.contest.known_ms[index])
                standings.trials[index] = trial
            rivals = list(indices)
            for _ in range(budgets.rival_processes):
                rivals = standings.again(rivals, budgets.rival_s)
            return standings, 0.0
        best_ms = self.contest.best_ms
        for index in indices:
            trial, timing = self.first(index, best_ms)
            standings.trials[index] = trial
            if timing is not None and trial.time_ms is not None:
                standings.timings[index] = [timing]
                best_ms = trial.time_ms if best_ms is None else min(best_ms, trial.time_ms)
        drift = self._first_again(standings)
        if self.contest.finalists:
            standings.choose()
        return standings, drift

    def _first_again(self, standings: Standings) -> float:
        again_s = self.contest.budgets.first_again_s
        index = next(iter(standings.timings), None)
        if not again_s or index is None:
            return 0.0
        _, timing = self.first(index, None, again_s)
        before = standings.timings[index][0]["time_ms"]
        return 0.0 if timing is None else _change(before, timing["time_ms"])

    def _probe(self) -> dict[str, Any] | None:
        try:
            return self._calls.clean("probe", self.contest.start_s) or None
        except ChildFault:
            return None

    def first(
        self,
        index: int,
        best_ms: float | None,
        budget_s: float | None = None,
        *,
        again: bool = False,
    ) -> tuple[Trial, Mapping[str, Any] | None]:
        """The trial of a candidate that is checked and measured for up to `budget_s`, and its
        timing if it is right."""
        try:
            job = self.contest.jobs[index]
            # not this candidate's time
            self._calls.shared("prepare", self.contest.start_s, job=job)
            if self.contest.finalists:
                self._saved()  # before a candidate runs there
            path = str(self._paths[index])
            answer = self._calls.shared(
                "measure",
                self.contest.limit_s,
                job=job,
                path=path,
                best_ms=best_ms,
                budget_s=budget_s or self.contest.budgets.candidate_s,
            )
        except ChildFault as error:
            # it may be the word of a candidate before this one
            if isinstance(error, ChildGarbled) and not again:
                return self.first(index, best_ms, budget_s, again=True)
            return _failed(index, error), None
        if answer["timing"] is None:
            text = answer.get("report") or _why_wrong(answer["error"], answer["tolerance"])
            return Trial(
                index=index, cause=Cause.WRONG_RESULT, output_tail=text, max_error=answer["error"]
            ), None
        facts = {name: answer[name] for name in ("ended_early", "parts")}
        text = answer.get("report", "")
        trial = Trial(index=index, max_error=answer["error"], output_tail=text, **facts)
        return with_timings(trial, [answer["timing"]]), answer["timing"]

    def again(
        self, trials: Sequence[Trial], budget_s: float
    ) -> dict[int, Mapping[str, Any] | Trial]:
        """The timings of these trials in one fresh process, by index; a trial that failed there
        instead of a timing."""
        try:
            return dict(
                zip((t.index for t in trials), self._timings(trials, budget_s), strict=True)
            )
        except DeviceHeld:
            return {}
        except ChildFault as error:
            if len(trials) == 1:
                return {trials[0].index: _failed(trials[0].index, error)}
        found: dict[int, Mapping[str, Any] | Trial] = {}  # which of them it was
        for trial in trials:
            found |= self.again([trial], budget_s)
        return found

    def _timings(self, trials: Sequence[Trial], budget_s: float) -> list[Mapping[str, Any]]:
        saved = {"inputs": str(self._inputs), "arrays": self._saved()}
        paths = [str(self._paths[trial.index]) for trial in trials]
        times_ms = [trial.time_ms for trial in trials]
        found = self._calls.fresh(
            "again",
            self.contest.limit_s * len(trials),
            jobs=[self.contest.jobs[trial.index] for trial in trials],
            paths=paths,
            times_ms=times_ms,
            budget_s=budget_s,
            **saved,
        )
        return list(found["timings"])

    def _saved(self) -> Any:
        if self._arrays is None:
            job = next(iter(self.contest.jobs.values()))
            answer = self._calls.shared(
                "save_inputs", self.contest.start_s, job=job, path=str(self._inputs)
            )
            self._arrays = answer["arrays"]
        return self._arrays


def _has_winner(trials: Sequence[Trial]) -> bool:
    return any(trial.eligible and trial.time_ms is not None for trial in trials)


def _best(trials: Sequence[Trial]) -> Trial | None:
    """The fastest eligible trial, or without one the fastest of all."""
    return min(
        (t for t in trials if t.time_ms is not None),
        key=lambda t: (not t.eligible, t.time_ms, t.index),
        default=None,
    )


def _why_wrong(error: float | None, tolerance: float) -> str:
    """Why an answer is wrong; without an error it has values that are no numbers."""
    if error is None:
        return "not all of the output was written, or it holds NaN or infinity"
    return f"the largest error is {error:.3g} of the largest value, more than {tolerance:g}"


def _failed(index: int, error: Exception) -> Trial:
    return Trial(index=index, **fault(error, Cause.RUN_ERROR, Cause.RUN_TIMEOUT))


def build_fault(error: Exception) -> dict[str, Any]:
    """Return `fault` of a step that proposes or builds candidates."""
    return fault(error, Cause.BUILD_ERROR, Cause.BUILD_TIMEOUT)


def fault(error: Exception, failed: Cause, hung: Cause) -> dict[str, Any]:
    """Return `cause` and `output_tail` of a trial or result after a child's failure or an unusable
    file of it."""
    words = "the builder wrote no file" if isinstance(error, FileNotFoundError) else str(error)
    if isinstance(error, ChildFault):
        words = f"{error.tail.rstrip()}\n{error}".strip()
    return {
        "cause": hung if isinstance(error, ChildTimeout) else failed,
        "output_tail": tail(words),
    }


def _change(one: float, other: float) -> float:
    """Return the difference of two values as a part of the smaller one."""
    return max(one, other) / min(one, other) - 1
