"""Models: tune the tasks of one in a session."""

from __future__ import annotations

import contextlib
import enum
import time
from collections import defaultdict, deque
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from functools import partial
from pathlib import Path
from typing import Any

from tuna.api import Progress, RunStopped, jobs, preparation, progress
from tuna.api.rows import Only, configs, open_database, reading
from tuna.libraries.registry import get_library
from tuna_models.api.building import BuiltModel, build_model
from tuna_models.child_answers import Estimates
from tuna_models.judging.checks import Checks
from tuna_models.work import known_kernels, store, tuning_order
from tuna_models.work.known_kernels import Winner
from tuna_models.work.session import SESSION, ModelWork, find_model, open_work, planned_for
from tuna_models.work.store import StoredModel
from tuna_models.work.tuning_order import Tunable, Wanted


class Ending(str, enum.Enum):
    """Why tuning for a wanted time of the model ended."""

    MET = "met"  #: the model takes no longer
    IMPOSSIBLE = "impossible"  #: the estimates say that it cannot be met
    BUDGET = "budget"  #: the time is over
    DONE = "done"  #: all jobs are done

    __str__ = str.__str__


@dataclass(frozen=True)
class Latency:
    """A wanted time of the model, and how it is built to be measured."""

    target_ms: float
    checks: Checks = field(default_factory=Checks)


@dataclass(frozen=True)
class Reached:
    """The outcome of tuning for a wanted time of the model."""

    ending: Ending
    target_ms: float
    best_ms: float  #: Time of the model as it was built last
    least_ms: float  #: Time that the estimates expect once all jobs are done


@dataclass(frozen=True)
class TunedModel:
    """Counts of the jobs of a model that was tuned."""

    model: StoredModel
    session_id: int
    tasks: int  #: Number of tasks that solvers can run
    known: int  #: Tasks that had a result before
    wanted: int  #: Jobs that were missing
    undecided: int = 0  #: Tasks with two solvers or more between which the estimates do not decide
    added: int = 0  #: Jobs that were loaded: all, or as many as were needed or fitted in
    errored: int = 0  #: Jobs of the model that failed for good
    unmeasured: int = 0  #: Tasks that have no result, and keep a similar or predicted kernel
    reached: Reached | None = None  #: how the wanted time was met; None: none was wanted


def tune_model(
    name: str,
    *,
    candidates: int = 4,
    winograd: bool = True,
    minutes: float | None = None,
    latency: Latency | None = None,
    on_start: Callable[[TunedModel], None] | None = None,
    work: ModelWork | None = None,
) -> TunedModel:
    """Tune the tasks of an imported model in the session of `work`, by default that of all models
    on this machine, with emptied caches.

    Workers run on this machine if it is of the session's environment, else they are those that
    serve the session. Tasks for which the estimates do not decide between solvers come first,
    the heaviest before the others; then each task is tuned by the solver that should win, and then
    by others that may; `minutes` limits the time, 0 measures none. With `latency` the
    model is built and measured too: before the first job, and whenever what is known should meet
    the wanted time; it ends then, or when the estimates say that it cannot be met.

    Nothing that is known already is measured again, whichever model it was tuned for. After an
    interruption a second call resumes. `on_start` gets what is to be done before the workers start;
    the events of `work` count this model's jobs alone. It ends with them: what another model has
    left is for its own call. Raises NotFound, and with `latency` what `build_model` raises.
    """
    with contextlib.ExitStack() as stack:
        if work is None:
            work = stack.enter_context(open_work(model=name))
        return _Tuning(work, name, candidates, winograd, minutes).run(latency, on_start)


class _Tuning:
    """The jobs of a model's tasks, loaded as the budget allows."""

    def __init__(
        self, work: ModelWork, name: str, candidates: int, winograd: bool, minutes: float | None
    ) -> None:
        self._started = time.monotonic()
        self._work, self._winograd, self._candidates = work, winograd, candidates
        self._model = find_model(name, work)
        self._manifest = planned_for(self._model.manifest, work)
        self._budget = None if minutes is None else tuning_order.Budget(60 * minutes)
        known = self._winners()
        self._session_id = work.session_id()
        preparation.update_solvers("tvm")
        preparation.update_applicability(self._session_id, self._model.tag)
        self._tasks = self._tunable()
        self._waiting = deque(tuning_order.order(list(self._tasks.values()), candidates))
        self._recent: deque[Wanted] = deque(maxlen=tuning_order.Budget.AHEAD)
        self._seen: list[Progress] = []
        self._enough: Callable[[], bool] = lambda: False
        self._tuned = TunedModel(
            self._model,
            self._session_id,
            len(self._tasks),
            len(known),
            len(self._waiting),
            sum(bool(task.close) for task in self._tasks.values()),
        )

    def run(
        self, latency: Latency | None, on_start: Callable[[TunedModel], None] | None
    ) -> TunedModel:
        """Work through the jobs, or as many as it takes to meet a wanted time."""
        if on_start is not None:
            on_start(self._tuned)
        reached = None
        if latency is not None:
            reached = self._meet(latency)
        elif self._budget is None:
            self._work_through(self._tuned.wanted)
        elif self._budget.seconds:
            self._work_through(self._budget.AHEAD)
        added = self._tuned.wanted - len(self._waiting)
        errored = self._seen[-1].errored if self._seen else 0
        unmeasured = len(self._tasks.keys() - self._winners().keys())
        return replace(
            self._tuned, added=added, errored=errored, unmeasured=unmeasured, reached=reached
        )

    def _meet(self, latency: Latency) -> Reached:
        """Build and tune in turn until the wanted time is met, or cannot be."""
        target_ms, tuned_all = latency.target_ms, False
        while True:
            built = self._built(latency)
            best_ms = built.time_ms
            known = self._winners()
            _, least_ms = self._forecast(built, known)
            facts = (target_ms, best_ms, least_ms)
            if best_ms <= target_ms:
                return Reached(Ending.MET, *facts)
            if not (self._waiting or self._unfinished):
                return Reached(Ending.DONE, *facts)
            if self._over:
                return Reached(Ending.BUDGET, *facts)
            if least_ms > target_ms:
                return Reached(Ending.IMPOSSIBLE, *facts)
            if tuned_all:  # jobs that are left bring nothing
                return Reached(Ending.DONE, *facts)
            if not self._seen:  # the heaviest first, as it was measured
                self._order(built)
            self._enough = partial(self._should_meet, built, known, target_ms)
            self._work_through(tuning_order.Budget.AHEAD)
            tuned_all = self._winners() == known

    def _built(self, latency: Latency) -> BuiltModel:
        """The model with the best kernels that are known, measured."""
        checks = replace(latency.checks, rivals=False, untuned=False)
        with self._work.workspace.new_folder() as folder:
            return build_model(
                f"{self._model.name}@{self._model.version}",
                Path(folder) / f"{self._model.name.replace('/', '-')}.so",
                winograd=self._winograd,
                checks=checks,
                work=self._work,
            )

    def _should_meet(
        self, built: BuiltModel, before: Mapping[str, Winner], target_ms: float
    ) -> bool:
        return self._forecast(built, before)[0] <= target_ms

    def _forecast(self, built: BuiltModel, before: Mapping[str, Winner]) -> tuple[float, float]:
        """Expected and least milliseconds of the model, which was built with what was known
        `before`."""
        now, labels = self._winners(), built.functions_ms
        left: dict[int, set[str]] = defaultdict(set)
        for job in (*self._waiting, *(self._recent if self._unfinished else ())):
            left[job.config_id].add(job.solver)
        times = []
        for entry in self._manifest.tasks:
            task = self._tasks.get(entry.task.key)
            old, new = (
                winner.time_ms if (winner := known.get(entry.task.key)) else None
                for known in (before, now)
            )
            times.append(
                tuning_order.TaskTime(
                    labels.get(entry.task.label, 0.0),
                    entry.count,
                    old,
                    new,
                    1.0 if task is None else tuning_order.open_factor(task, left[task.config_id]),
                )
            )
        return tuning_order.forecast_ms(built.time_ms, times)

    def _order(self, built: BuiltModel) -> None:
        """Order the jobs that wait by the time that the model spends in their tasks."""
        tasks = []
        for entry in self._manifest.tasks:
            if entry.task.key in self._tasks:
                spent_ms = built.functions_ms.get(entry.task.label, 0.0)
                tasks.append(replace(self._tasks[entry.task.key], spent_ms=spent_ms))
        self._waiting = deque(tuning_order.order(tasks, self._candidates))

    @property
    def _unfinished(self) -> int:
        return self._seen[-1].unfinished if self._seen else 0

    @property
    def _over(self) -> bool:
        """Whether the time is over."""
        elapsed_s = time.monotonic() - self._started
        return self._budget is not None and elapsed_s > self._budget.seconds

    def _winners(self) -> dict[str, Winner]:
        source = self._work.scope(winograd=self._winograd)
        with reading(open_database()) as connection:
            return known_kernels.winners(connection, self._manifest, source)

    def _work_through(self, first: int) -> None:
        """Load the `first` jobs, and work until all are done, or it is to stop."""
        self._load(first)
        self._work.workspace.end_process()  # its memory is needed for longer than it is
        if self._tasks:
            with contextlib.suppress(RunStopped):
                self._work.run(self._follow)

    def _follow(self, whole: Progress) -> None:
        """Show the progress of the model's jobs, and load more. Raises RunStopped when they are
        done, the time is over, or the wanted time should be met."""
        with reading(open_database()) as connection:
            mine = progress(connection, get_library("tvm"), self._session_id, (), self._model.tag)
        more = not self._seen or mine.finished > self._seen[-1].finished
        self._seen.append(mine)
        self._work.events.on_progress(mine)
        if more and self._enough():
            raise RunStopped("What is known should meet the wanted time")
        if mine.unfinished and self._over:
            raise RunStopped("The time is over")
        if mine.unfinished and self._budget is not None:
            elapsed_s = time.monotonic() - self._started
            finished = mine.finished - self._seen[0].finished
            self._load(self._budget.more(elapsed_s, finished, mine.unfinished))
        elif mine.unfinished:
            self._load(tuning_order.Budget.AHEAD - mine.unfinished)
        elif whole.unfinished:
            raise RunStopped("All jobs of the model are done")

    def _load(self, count: int) -> None:
        """Make jobs of the first `count` that wait."""
        for _ in range(min(count, len(self._waiting))):
            job = self._waiting.popleft()
            self._recent.append(job)
            # the model decides, see `choosing`
            options: dict[str, Any] = {"candidates": job.candidates, "finalists": 0}
            options |= {"first": job.first} if job.first else {}
            jobs.load_jobs(
                self._session_id,
                tag=None,
                reason=SESSION,
                solvers=[job.solver],
                options=options,
                only=Only(config_ids=[job.config_id]),
            )

    def _tunable(self) -> dict[str, Tunable]:
        """The tasks that solvers can run, by key."""
        manifest, source = self._manifest, self._work.scope(winograd=self._winograd)
        with reading(open_database()) as connection:
            tunable = store.tunable(
                connection, self._model, self._session_id, winograd=self._winograd
            )
            won = known_kernels.warm_starts(connection, manifest, source)
            wanted = [entry for entry in manifest.tasks if entry.task.key in tunable]
            digests = [entry.task.body for entry in wanted if entry.task.body]
            bodies = {digest: configs.body(connection, digest).decode() for digest in digests}
        if not wanted:
            return {}
        process = self._work.process(self._model.name)
        asked = [entry.config for entry in wanted]
        arguments = {"tasks": asked, "target": manifest.target, "bodies": bodies}
        estimated = process.call(Estimates, "estimate", **arguments).cycles
        tasks = {}
        for entry in wanted:
            config_id, solvers, loaded = tunable[entry.task.key]
            tasks[entry.task.key] = Tunable(
                config_id,
                entry.count,
                frozenset(solvers),
                frozenset(loaded),
                cycles=estimated[entry.task.key],
                by_rule=entry.task.core is None,
                won=won.get(entry.task.key, {}),
            )
        return tasks
