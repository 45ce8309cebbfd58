"""Models: tune the tasks of one on this machine."""

from __future__ import annotations

import contextlib
import time
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from tuna.api import jobs, preparation, running
from tuna.coordinator.session_run import Progress, RunEvents, progress
from tuna.db import configs
from tuna.db.database import open_database
from tuna.db.engine import reading
from tuna.libraries.registry import get_library
from tuna.models import choice, store, tuning
from tuna.models.process import ModelProcess
from tuna.models.store import StoredModel
from tuna.models.tuning import Tunable, Wanted
from tuna.workers.launch import RunStopped

_SILENT = RunEvents()
#: Reason of the session in which the tasks of all models are tuned, so that one that two models
#: have is tuned once.
SESSION = "models"


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


def tune_model(
    name: str,
    *,
    candidates: int = 4,
    winograd: bool = True,
    minutes: float | None = None,
    on_start: Callable[[TunedModel], None] | None = None,
    events: RunEvents = _SILENT,
    on_log: Callable[[Path], None] | None = None,
) -> TunedModel:
    """Tune the tasks of an imported model with workers on this machine, with emptied caches.

    Each task is tuned by the solver that should win, the heaviest task first, then by others that
    may win; `minutes` limits the time. Nothing that is known already is measured again, whichever
    model it was tuned for. After an interruption a second call resumes. `on_start` gets what is to
    be done before the workers start; `events` and `on_log` are those of `api.run`, with the
    numbers of this model's jobs alone. It ends with them: what another model has left is
    for its own call. Raises NotFound.
    """
    started = time.monotonic()
    with reading(open_database()) as connection:
        model = store.find(connection, name)
        source = choice.ResultScope(winograd=winograd)
        known = choice.winners(connection, model.manifest, source)
    session = preparation.init_session("tvm", SESSION, conditions={"caches": "cold"})
    preparation.update_solvers("tvm")
    preparation.update_applicability(session.id, model.tag)
    tasks = _tunable(model, session.id, winograd)
    waiting = deque(tuning.order(tasks, candidates))
    tuned = TunedModel(model, session.id, len(tasks), len(known), len(waiting))
    if on_start is not None:
        on_start(tuned)
    if minutes is None:
        _load(session.id, waiting, len(waiting))
    budget = None if minutes is None else tuning.Budget(60 * minutes)
    seen: list[Progress] = []
    library = get_library("tvm")

    def follow(whole: Progress) -> None:
        with reading(open_database()) as connection:
            mine = progress(connection, library, session.id, (), model.tag)
        seen.append(mine)
        events.on_progress(mine)
        elapsed_s = time.monotonic() - started
        if budget is not None and mine.unfinished:
            if elapsed_s > budget.seconds:
                raise RunStopped("The time is over")
            _load(
                session.id,
                waiting,
                budget.more(elapsed_s, mine.finished - seen[0].finished, mine.unfinished),
            )
        elif whole.unfinished and not mine.unfinished:
            raise RunStopped("All jobs of the model are done")

    if budget is not None:
        _load(session.id, waiting, budget.AHEAD)
    if tasks:
        with contextlib.suppress(RunStopped):
            running.run(session.id, on_progress=follow, events=events, on_log=on_log)
    return replace(
        tuned, added=tuned.wanted - len(waiting), errored=seen[-1].errored if seen else 0
    )


def _load(session_id: int, waiting: deque[Wanted], count: int) -> None:
    """Make jobs of the first `count` that wait."""
    for _ in range(min(count, len(waiting))):
        job = waiting.popleft()
        # the model decides, see `choosing`
        options: dict[str, Any] = {"candidates": job.candidates, "finalists": 0}
        options |= {"first": job.first} if job.first else {}
        jobs.load_jobs(
            session_id,
            tag=None,
            reason=SESSION,
            solvers=[job.solver],
            options=options,
            only=jobs.Only(config_ids=[job.config_id]),
        )


def _tunable(model: StoredModel, session_id: int, winograd: bool) -> list[Tunable]:
    with reading(open_database()) as connection:
        found = store.tunable(connection, model, session_id, winograd=winograd)
        won = choice.warm_starts(connection, model.manifest, choice.ResultScope(winograd=winograd))
        digests = [
            entry.task.body
            for entry in model.manifest.tasks
            if entry.task.key in found and entry.task.body
        ]
        bodies = {digest: configs.body(connection, digest).decode() for digest in digests}
    wanted = [entry for entry in model.manifest.tasks if entry.task.key in found]
    if not wanted:
        return []
    target = model.manifest.target
    with ModelProcess(target, model.name) as process:
        asked = {"tasks": [entry.config for entry in wanted], "target": target, "bodies": bodies}
        estimated = process.call("estimate", **asked)["cycles"]
    tasks = []
    for entry in wanted:
        config_id, solvers, loaded = found[entry.task.key]
        cycles = estimated[entry.task.key]
        by_rule, alike = entry.task.core is None, won.get(entry.task.key, {})
        tasks.append(
            Tunable(
                config_id,
                entry.count,
                frozenset(solvers),
                frozenset(loaded),
                cycles,
                by_rule,
                alike,
            )
        )
    return tasks
