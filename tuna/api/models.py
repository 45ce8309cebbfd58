"""Models: import them, list them, show and tune their tasks."""

from __future__ import annotations

import contextlib
import hashlib
import tempfile
import time
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from tuna.api import jobs, preparation, running
from tuna.artifacts.store import Artifacts
from tuna.coordinator.session_run import Progress, RunEvents, progress
from tuna.db import configs, sessions
from tuna.db.database import open_database
from tuna.db.engine import reading, writing
from tuna.db.jobs import Only
from tuna.errors import BadInput
from tuna.libraries.registry import get_library
from tuna.models import choice, files, store, tuning
from tuna.models.choice import Winner
from tuna.models.manifest import Manifest
from tuna.models.process import ModelProcess
from tuna.models.store import StoredModel
from tuna.models.tuning import Tunable, Wanted
from tuna.settings import get_settings
from tuna.workers.launch import RunStopped

#: How files end that are models.
MODEL_ENDINGS = (".onnx", ".pt2")
#: Reason of the session in which the tasks of all models are tuned, so that one that two models
#: have is tuned once.
SESSION = "models"
_SILENT = RunEvents()


@dataclass(frozen=True)
class ImportedModel:
    """An import: the model, and how many of its tasks are new."""

    model: StoredModel
    added: int


@dataclass(frozen=True)
class ModelTask:
    """A task of a model, and what is known of it."""

    label: str
    key: str
    count: int
    core: bool
    models: int  #: other imports that have it
    winner: Winner | None


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


def import_model(
    name: str,
    path: Path,
    *,
    batch: int | None = None,
    shapes: Mapping[str, Sequence[int]] | None = None,
) -> ImportedModel:
    """Import an ONNX file, or a program of `torch.export`, under a name: its tasks become configs
    with their counts.

    `batch` is the first extent of each input that `shapes` does not name; `shapes` may also have
    one value for the name of an open extent. Weights in files of their own are taken from the
    model's folder. Raises BadInput for a file that cannot be imported, with all the operators and
    open extents that are in the way; LibraryMissing without TVM or onnx.
    """
    data = _read(path)
    target = get_library("tvm").environment().target
    engine = open_database()
    with (
        tempfile.TemporaryDirectory() as folder,
        ModelProcess(target, path.name, writable=(Path(folder),)) as process,
    ):
        text, copy = Path(folder) / "module.py", Path(folder) / "model" / path.name
        files.lay_out(copy, data, {})
        places = process.call("locations", path=str(copy))["locations"]
        beside = {place: files.read_beside(path, place) for place in places}
        files.lay_out(copy, data, beside)
        wanted = {key: list(value) for key, value in (shapes or {}).items()}
        found = process.call(
            "inspect", path=str(copy), target=target, shapes=wanted, batch=batch, text=str(text)
        )
        artifacts = artifacts_of_models()
        manifest = Manifest(
            file=artifacts.put(data),
            data={place: artifacts.put(weights) for place, weights in beside.items()},
            size_bytes=len(data) + sum(map(len, beside.values())),
            opset=found["opset"],
            shapes={value["name"]: tuple(value["shape"]) for value in found["inputs"]},
            target=target,
            tvm=found["tvm"],
            inputs=found["inputs"],
            tasks=[{"config": config, "count": count} for config, count in found["tasks"]],
            text=artifacts.put(text.read_bytes()),
        )
    bodies = {digest: body.encode() for digest, body in found["bodies"].items()}
    assert all(hashlib.sha256(body).hexdigest() == digest for digest, body in bodies.items())
    with writing(engine) as connection:
        stored = store.save(connection, name, manifest, bodies)
    return ImportedModel(store.StoredModel(name, manifest), stored.added)


def list_models() -> list[StoredModel]:
    """Every import, the latest first."""
    with reading(open_database()) as connection:
        return store.list_all(connection)


def show_model(name: str) -> tuple[StoredModel, list[ModelTask]]:
    """The latest import under a name with its tasks; raises NotFound."""
    with reading(open_database()) as connection:
        model = store.find(connection, name)
        winners, shared = (
            choice.winners(connection, model.manifest, choice.ResultScope()),
            store.counts(connection, model),
        )
    tasks = []
    for entry in model.manifest.tasks:
        task = entry.task
        winner = winners.get(task.key)
        tasks.append(
            ModelTask(
                task.label,
                task.key,
                entry.count,
                task.core is not None,
                shared.get(task.key, 0),
                winner,
            )
        )
    return model, tasks


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
        # the model decides, see `in_model`
        options: dict[str, Any] = {"candidates": job.candidates, "finalists": 0}
        options |= {"first": job.first} if job.first else {}
        jobs.load_jobs(
            session_id,
            tag=None,
            reason=SESSION,
            solvers=[job.solver],
            options=options,
            only=Only(config_ids=[job.config_id]),
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


def _read(path: Path) -> bytes:
    if path.suffix not in MODEL_ENDINGS:
        raise BadInput(
            f"{path.name} is no model that can be imported.",
            hint="*.onnx, or *.pt2 as torch.export.save writes it",
        )
    return files.read(path)


def artifacts_of_models() -> Artifacts:
    """The store that has the files of models, whose digests are in SQL: no signature is needed."""
    with reading(open_database()) as connection:
        return Artifacts.from_settings(get_settings(), sessions.namespace(connection))
