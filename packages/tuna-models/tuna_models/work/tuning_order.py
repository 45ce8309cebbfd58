"""Order in which a model's tasks are tuned, within a budget of time. Imports no TVM."""

from __future__ import annotations

import statistics
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, field

#: Factor by which a kernel may be faster than its estimate, compared with another kernel.
_DOUBT = 0.7
#: Factor within which the estimates of two families of kernels do not say which is the faster one.
CLOSE = 1.3
#: Bounds of the time that kernels take inside a model, over what they take alone.
_MIN_INSIDE, _MAX_INSIDE = 0.8, 1.5
#: Share of the model's time below which a task gets one candidate.
_SMALL = 0.001
#: Share of the model's time from which a function with a schedule by rule is tuned, and how many
#: times more candidates it gets, since they are random.
_WORTH, _MORE = 0.01, 4


@dataclass(frozen=True)
class Tunable:
    """A task of a model that solvers can run, with estimates and earlier winners."""

    config_id: int
    count: int  #: Number of its calls in the model
    solvers: frozenset[str]  #: names of the solvers that apply
    loaded: frozenset[str] = frozenset()  #: solvers with a job in this session
    #: Estimated cycles of each solver's best point.
    cycles: Mapping[str, float] = field(default_factory=dict)
    #: True for a task without core that is scheduled by rule: a search may improve it a little.
    by_rule: bool = False
    #: winning points for the bare layer or a similar task, by solver, the fastest first
    won: Mapping[str, str] = field(default_factory=dict)
    spent_ms: float | None = None  #: Its part of a run of the model, if measured

    @property
    def favourite(self) -> str:
        """The solver that won for the bare layer or a similar task; empty where none applies."""
        return next((name for name in self.won if name in self.solvers), "")

    @property
    def weight(self) -> float:
        """The model's time in it, measured or in estimated cycles."""
        return self.count * self.least if self.spent_ms is None else self.spent_ms

    @property
    def least(self) -> float:
        """Cycles that the best kernel is expected to take; 0 without an estimate."""
        return min((self.cycles[name] for name in self.solvers if name in self.cycles), default=0.0)

    @property
    def close(self) -> frozenset[str]:
        """The solvers between which the estimates do not decide; empty where one is the best."""
        near = CLOSE * self.least
        found = {name for name in self.solvers if self.cycles.get(name, float("inf")) <= near}
        return frozenset(found) if len(found) > 1 else frozenset()


@dataclass(frozen=True)
class Wanted:
    """A job to load."""

    config_id: int
    solver: str
    candidates: int
    first: str = ""  #: the point of the solver's space to try first


def order(tasks: Sequence[Tunable], candidates: int) -> list[Wanted]:
    """Return the missing jobs, the most useful first.

    First come the tasks for which the estimates do not decide between solvers, as long as the
    model's time in them is not measured either: those in which it spends most before the others,
    each with all such solvers. Then each other task gets
    a job of the solver that won for the most similar task, else of the one with the best estimate,
    and then other solvers follow by the time that the model may save with them. Solvers that can
    hardly win are left out, and so are functions with a schedule by rule that take little time.
    """
    total = sum(task.weight for task in tasks)
    ranked: list[tuple[tuple[int, float], Wanted]] = []
    for task in tasks:
        weight = task.weight
        small = total > 0 and weight < _SMALL * total
        if task.by_rule:
            wanted = [
                name
                for name in sorted(task.solvers - task.loaded)
                if weight > 0 and weight >= _WORTH * total
            ]
            jobs = (Wanted(task.config_id, name, _MORE * candidates) for name in wanted)
            ranked += [((2, -(1 - _DOUBT) * weight), job) for job in jobs]
            continue
        measured = task.spent_ms is not None
        close = frozenset() if small or measured else task.close
        for rank, solver in enumerate(sorted(task.solvers, key=lambda name: _expected(task, name))):
            gain = _gain(task, solver)
            if solver in task.loaded or (rank > 0 and (gain == 0.0 or small)):
                continue
            turn = 0 if solver in close or (close and rank == 0) else min(rank, 1) + 1
            worth = weight * gain / task.least if turn == 2 else weight
            job = Wanted(
                task.config_id, solver, 1 if small else candidates, task.won.get(solver, "")
            )
            ranked.append(((turn, -worth), job))
    return [job for _, job in sorted(ranked, key=lambda entry: entry[0])]


def _expected(task: Tunable, solver: str) -> tuple[bool, float, str]:
    return solver != task.favourite, task.cycles.get(solver, float("inf")), solver


def _gain(task: Tunable, solver: str) -> float:
    """Cycles of a call that the solver may save."""
    return max(0.0, task.least - _DOUBT * task.cycles.get(solver, float("inf")))


@dataclass(frozen=True)
class TaskTime:
    """The time of a run of the model that it spends in a task."""

    spent_ms: float  #: measured in the model with the kernel that it was built with
    calls: int
    before_ms: float | None  #: Time of that kernel alone; None: not measured alone
    now_ms: float | None  #: Time of the best kernel that is known now, alone
    #: Factor by which the jobs that are left may make it faster; 1: none is left
    open_factor: float = 1.0


def forecast_ms(model_ms: float, tasks: Sequence[TaskTime]) -> tuple[float, float]:
    """Return the time that is expected of the model with the best kernels known now, and the least
    that it may take once all jobs are done, as far as estimates can tell.

    `model_ms` is its time as it was built. A kernel is expected to gain in the model what it gains
    alone.
    """
    ratios = [task.spent_ms / (task.calls * task.before_ms) for task in tasks if task.before_ms]
    inside = min(max(statistics.median(ratios), _MIN_INSIDE), _MAX_INSIDE) if ratios else 1.0
    expected = least = model_ms
    for task in tasks:
        now_ms = task.spent_ms
        if task.now_ms is not None and task.before_ms:
            now_ms *= min(1.0, task.now_ms / task.before_ms)
        elif task.now_ms is not None:
            now_ms = min(now_ms, inside * task.calls * task.now_ms)
        expected -= task.spent_ms - now_ms
        least -= task.spent_ms - now_ms * task.open_factor
    return expected, least


def open_factor(task: Tunable, solvers: Collection[str]) -> float:
    """By how much jobs of these solvers may make a task faster than its best kernel, as a
    factor."""
    if not solvers:
        return 1.0
    if task.by_rule or not task.least:
        return _DOUBT
    factors = (_DOUBT * task.cycles[name] / task.least for name in solvers if name in task.cycles)
    return min(1.0, min(factors, default=_DOUBT))


class Budget:
    """Number of jobs to load so that all of them end in time."""

    #: Unfinished jobs, so that compilers work ahead.
    AHEAD = 4
    #: Seconds that a job is expected to take before the first one has ended.
    _FIRST_S = 6.0

    def __init__(self, seconds: float) -> None:
        self.seconds = seconds
        self._began: tuple[float, int] | None = None

    def more(self, elapsed_s: float, finished: int, unfinished: int) -> int:
        """Return the number of jobs to load now, from the numbers of jobs since the start."""
        if finished and self._began is None:
            self._began = elapsed_s, finished
        left_s = self.seconds - elapsed_s
        fitting = int(left_s / self._pace_s(elapsed_s, finished)) - unfinished
        return max(0, min(self.AHEAD - unfinished, fitting))

    def _pace_s(self, elapsed_s: float, finished: int) -> float:
        """Seconds of a job after the first one, which includes the start of workers."""
        if self._began is None or finished == self._began[1]:
            return self._FIRST_S
        return (elapsed_s - self._began[0]) / (finished - self._began[1])
