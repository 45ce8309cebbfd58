"""Models: tune the tasks of one in a session."""

from __future__ import annotations

import contextlib
import time
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from tuna.api import jobs, preparation
from tuna.api.model_work import SESSION, ModelWork, find_model, open_work, planned_for
from tuna.coordinator.session_run import Progress, RunEvents, progress
from tuna.db import configs
from tuna.db.database import open_database
from tuna.db.engine import reading
from tuna.libraries.registry import get_library
from tuna.models import choice, store, tuning
from tuna.models.process import ModelProcess
from tuna.models.store import StoredModel
from tuna.models.tuning import Tunable
from tuna.workers.launch import RunStopped


@dataclass(frozen=True)
class TunedModel:
    """Counts of the jobs of a model that was tuned."""

    model: StoredModel
    session_id: int
    tasks: int  #: that solvers can run
    known: int  #: of them, those that had a result before
    wanted: int  #: jobs that were missing
    added: int = 0  #: of them, those that were loaded: all, or as many as fitted into the time
    errored: int = 0  #: jobs of the model that failed for good, once all are finished


_SILENT = RunEvents()


def tune_model(
    name: str,
    *,
    session_id: int | None = None,
    candidates: int = 4,
    winograd: bool = True,
    minutes: float | None = None,
    on_start: Callable[[TunedModel], None] | None = None,
    events: RunEvents = _SILENT,
    on_log: Callable[[Path], None] | None = None,
    work: ModelWork | None = None,
) -> TunedModel:
    """Tune the tasks of an imported model in a session, by default that of all models on this
    machine, with emptied caches.

    Workers run on this machine if it is of the session's environment, else they are those that
    serve the session. Each task is tuned by the solver that should win, the heaviest task first,
    then by others that may win; `minutes` limits the time. Nothing that is known already is
    measured again, whichever model it was tuned for. After an interruption a second call resumes.
    `on_start` gets what is to be done before the workers start; `events` and `on_log` are those of
    `api.run`, with the numbers of this model's jobs alone. It ends with them: what another model
    has left is for its own call. `work`: where it is done, in the place of `session_id`, `events`
    and `on_log`. Raises NotFound.
    """
    with contextlib.ExitStack() as stack:
        if work is None:
            opened = open_work(session_id, model=name, events=events, on_log=on_log)
            work = stack.enter_context(opened)
        return _Tuning(work, name, candidates, winograd, minutes).run(on_start)


class _Tuning:
    """The jobs of a model's tasks, loaded as the budget allows."""

    def __init__(
        self, work: ModelWork, name: str, candidates: int, winograd: bool, minutes: float | None
    ) -> None:
        self._started = time.monotonic()
        self._work, self._winograd = work, winograd
        self._model = find_model(name, work)
        self._manifest = planned_for(self._model.manifest, work)
        self._budget = None if minutes is None else tuning.Budget(60 * minutes)
        with reading(open_database()) as connection:
            self._known = choice.winners(connection, self._manifest, work.scope(winograd=winograd))
        self._session_id = work.session_id()
        preparation.update_solvers("tvm")
        preparation.update_applicability(self._session_id, self._model.tag)
        self._tasks = self._tunable()
        self._waiting = deque(tuning.order(self._tasks, candidates))
        self._seen: list[Progress] = []

    def run(self, on_start: Callable[[TunedModel], None] | None) -> TunedModel:
        """Work through the jobs."""
        wanted = len(self._waiting)
        tuned = TunedModel(
            self._model, self._session_id, len(self._tasks), len(self._known), wanted
        )
        if on_start is not None:
            on_start(tuned)
        self._load(wanted if self._budget is None else self._budget.AHEAD)
        if self._tasks:
            with contextlib.suppress(RunStopped):
                self._work.run(self._follow)
        errored = self._seen[-1].errored if self._seen else 0
        return replace(tuned, added=wanted - len(self._waiting), errored=errored)

    def _follow(self, whole: Progress) -> None:
        """Show the progress of the model's jobs, and load more. Raises RunStopped when they are
        done, or the time is over."""
        with reading(open_database()) as connection:
            mine = progress(connection, get_library("tvm"), self._session_id, (), self._model.tag)
        self._seen.append(mine)
        self._work.events.on_progress(mine)
        elapsed_s = time.monotonic() - self._started
        if self._budget is not None and mine.unfinished:
            if elapsed_s > self._budget.seconds:
                raise RunStopped("The time is over")
            finished = mine.finished - self._seen[0].finished
            self._load(self._budget.more(elapsed_s, finished, mine.unfinished))
        elif whole.unfinished and not mine.unfinished:
            raise RunStopped("All jobs of the model are done")

    def _load(self, count: int) -> None:
        """Make jobs of the first `count` that wait."""
        for _ in range(min(count, len(self._waiting))):
            job = self._waiting.popleft()
            # the model decides, see `choosing`
            options: dict[str, Any] = {"candidates": job.candidates, "finalists": 0}
            options |= {"first": job.first} if job.first else {}
            jobs.load_jobs(
                self._session_id,
                tag=None,
                reason=SESSION,
                solvers=[job.solver],
                options=options,
                only=jobs.Only(config_ids=[job.config_id]),
            )

    def _tunable(self) -> list[Tunable]:
        manifest, source = self._manifest, self._work.scope(winograd=self._winograd)
        with reading(open_database()) as connection:
            found = store.tunable(
                connection, self._model, self._session_id, winograd=self._winograd
            )
            won = choice.warm_starts(connection, manifest, source)
            wanted = [entry for entry in manifest.tasks if entry.task.key in found]
            digests = [entry.task.body for entry in wanted if entry.task.body]
            bodies = {digest: configs.body(connection, digest).decode() for digest in digests}
        if not wanted:
            return []
        with ModelProcess(manifest.target, self._model.name) as process:
            asked = [entry.config for entry in wanted]
            estimated = process.call(
                "estimate", tasks=asked, target=manifest.target, bodies=bodies
            )["cycles"]
        tasks = []
        for entry in wanted:
            config_id, solvers, loaded = found[entry.task.key]
            tasks.append(
                Tunable(
                    config_id,
                    entry.count,
                    frozenset(solvers),
                    frozenset(loaded),
                    cycles=estimated[entry.task.key],
                    by_rule=entry.task.core is None,
                    won=won.get(entry.task.key, {}),
                )
            )
        return tasks
