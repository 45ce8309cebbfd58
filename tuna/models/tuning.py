"""In which order the tasks of a model are tuned, and how many jobs still fit into the time. Imports
no TVM."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

#: A kernel may be this much faster than its estimate says, against another one.
_DOUBT = 0.7
#: Tasks that take less of the model's time get one candidate.
_SMALL = 0.001
#: Functions that have a schedule by rule are tuned where they take so much of the model's time,
#: with so many times as many candidates, which are random.
_WORTH, _MORE = 0.01, 4


@dataclass(frozen=True)
class Tunable:
    """A task of a model that solvers can run, and what is known of it."""

    config_id: int
    count: int  #: how often the model calls it
    solvers: frozenset[str]  #: that apply
    loaded: frozenset[str] = frozenset()  #: of them, those that have a job in this session
    #: of the best point of a solver, by estimate
    cycles: Mapping[str, float] = field(default_factory=dict)
    #: it has no core, and a schedule by rule, which a search may improve a little
    by_rule: bool = False
    #: by solver, the fastest first, the points that won for the bare layer or a similar task
    won: Mapping[str, str] = field(default_factory=dict)

    @property
    def favourite(self) -> str:
        """The solver that won for the bare layer or a similar task; empty where none applies."""
        return next((name for name in self.won if name in self.solvers), "")

    @property
    def least(self) -> float:
        """Cycles that the best kernel is expected to take; 0 without an estimate."""
        return min((self.cycles[name] for name in self.solvers if name in self.cycles), default=0.0)


@dataclass(frozen=True)
class Wanted:
    """A job to load."""

    config_id: int
    solver: str
    candidates: int
    first: str = ""  #: the point of the solver's space to try first


def order(tasks: Sequence[Tunable], candidates: int) -> list[Wanted]:
    """The jobs that are missing, the most useful first.

    Each task first gets a job of the solver that won for what is the most alike, else of the one
    that should win. Tasks on which the model spends most of its time come before the others. Then
    other solvers follow by what the model may gain: its time in the task, times the part of it that
    they may save. Those that can hardly win are left out, and so are functions with a schedule by
    rule that take little time.
    """
    total = sum(task.count * task.least for task in tasks)
    found: list[tuple[tuple[int, float], Wanted]] = []
    for task in tasks:
        weight = task.count * task.least
        small = total > 0 and weight < _SMALL * total
        if task.by_rule:
            wanted = [
                name
                for name in sorted(task.solvers - task.loaded)
                if weight > 0 and weight >= _WORTH * total
            ]
            jobs = (Wanted(task.config_id, name, _MORE * candidates) for name in wanted)
            found += [((1, -(1 - _DOUBT) * weight), job) for job in jobs]
            continue
        for rank, solver in enumerate(sorted(task.solvers, key=lambda name: _expected(task, name))):
            gain = _gain(task, solver)
            if solver in task.loaded or (rank > 0 and (gain == 0.0 or small)):
                continue
            worth = weight if rank == 0 else task.count * gain
            job = Wanted(
                task.config_id, solver, 1 if small else candidates, task.won.get(solver, "")
            )
            found.append(((min(rank, 1), -worth), job))
    return [job for _, job in sorted(found, key=lambda entry: entry[0])]


def _expected(task: Tunable, solver: str) -> tuple[bool, float, str]:
    return solver != task.favourite, task.cycles.get(solver, float("inf")), solver


def _gain(task: Tunable, solver: str) -> float:
    """Cycles of a call that the solver may save."""
    return max(0.0, task.least - _DOUBT * task.cycles.get(solver, float("inf")))


class Budget:
    """How many jobs may be loaded so that all of them end in time."""

    #: Jobs that are loaded beyond those that are finished, so that compilers work ahead.
    AHEAD = 4
    #: Seconds that a job is expected to take before the first one has ended.
    _FIRST_S = 6.0

    def __init__(self, seconds: float) -> None:
        self.seconds = seconds
        self._began: tuple[float, int] | None = None

    def more(self, elapsed_s: float, finished: int, unfinished: int) -> int:
        """How many jobs to load now; `finished` and `unfinished` are numbers of jobs since the
        start."""
        if finished and self._began is None:
            self._began = elapsed_s, finished
        left_s = self.seconds - elapsed_s
        fitting = int(left_s / self._pace_s(elapsed_s, finished)) - unfinished
        return max(0, min(self.AHEAD - unfinished, fitting))

    def _pace_s(self, elapsed_s: float, finished: int) -> float:
        """Seconds of a job, since the first ended: before it the workers started."""
        if self._began is None or finished == self._began[1]:
            return self._FIRST_S
        return (elapsed_s - self._began[0]) / (finished - self._began[1])
