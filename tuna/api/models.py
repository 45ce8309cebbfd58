"""Models: import one, tune its tasks, build it with the kernels that won."""

from __future__ import annotations

import json
from collections import defaultdict
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from tuna.errors import BadInput, NotFound

if TYPE_CHECKING:
    from tuna.artifacts import Artifacts
    from tuna.models.manifest import Class
    from tuna.models.store import StoredModel, Winner
    from tuna.workers.session_run import Progress

#: Reason of the session in which the tasks of all models are tuned, so that one that two models have is tuned once.
SESSION = "models"
#: Largest error relative to the largest magnitude of the answer that a built model may have.
TOLERANCE = 1e-3


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
    """What tuning a model did."""

    model: StoredModel
    session_id: int
    tasks: int  #: with a core, which can be tuned
    known: int  #: of them, those that had a result before
    added: int  #: jobs
    errored: int = 0  #: jobs that failed for good, once all are finished


@dataclass(frozen=True)
class BuiltModel:
    """A built model as it was checked and timed on this machine."""

    path: Path
    model: StoredModel
    errors: Mapping[
        str, float
    ]  #: against ONNX's `reference` and, where installed, `onnxruntime`; relative to the largest magnitude
    times_ms: Mapping[str, Sequence[float]]  #: by contender, CPU time of the thread, rounds in turn
    tasks: Mapping[Class, int]
    shares: Mapping[Class, float]  #: of the time that the model's functions take
    runtime_share: float  #: of the time, spent in TVM's virtual machine and allocation
    functions_ms: Mapping[str, float]  #: by label, all calls together
    refused: Mapping[str, str] = field(default_factory=dict)  #: records that could not be applied, by task label


def import_model(
    name: str, path: Path, *, batch: int | None = None, shapes: Mapping[str, Sequence[int]] | None = None
) -> ImportedModel:
    """Import the ONNX file under a name: its tasks become configs with their counts.

    `batch` is the first extent of each input that `shapes` does not name. Raises BadInput for a file that cannot be
    imported, with all the operators that are in the way; LibraryMissing without TVM or onnx.
    """
    import hashlib
    import tempfile

    from tuna.db.database import open_database
    from tuna.db.engine import writing
    from tuna.libraries.registry import get_library
    from tuna.models import store
    from tuna.models.manifest import Manifest
    from tuna.models.process import ModelProcess

    data = _read(path)
    target = get_library("tvm").environment().target
    engine = open_database()
    with tempfile.TemporaryDirectory() as folder, ModelProcess(target) as process:
        text = Path(folder) / "module.py"
        wanted = {key: list(value) for key, value in (shapes or {}).items()}
        found = process.call(
            "inspect", path=str(path.resolve()), target=target, shapes=wanted, batch=batch, text=str(text)
        )
        artifacts = _artifacts()
        manifest = Manifest(
            file=artifacts.put(data),
            size_bytes=len(data),
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
    from tuna.db.database import open_database
    from tuna.db.engine import reading
    from tuna.models import store

    with reading(open_database()) as connection:
        return store.list_all(connection)


def show_model(name: str) -> tuple[StoredModel, list[ModelTask]]:
    """The latest import under a name with its tasks; raises NotFound."""
    from tuna.db.database import open_database
    from tuna.db.engine import reading
    from tuna.models import store

    with reading(open_database()) as connection:
        model = store.find(connection, name)
        winners, shared = store.winners(connection, model), store.counts(connection, model)
    tasks = []
    for entry in model.manifest.tasks:
        task = entry.task
        winner = winners.get(task.key)
        tasks.append(
            ModelTask(task.label, task.key, entry.count, task.core is not None, shared.get(task.key, 0), winner)
        )
    return model, tasks


def tune_model(
    name: str,
    *,
    candidates: int = 4,
    winograd: bool = True,
    on_start: Callable[[TunedModel], None] | None = None,
    on_progress: Callable[[Progress], None] | None = None,
) -> TunedModel:
    """Tune the tasks of an imported model that have a core, with workers on this machine.

    Nothing that is known already is measured again, whichever model it was tuned for. After an interruption a second call
    resumes. `on_start` gets what is to be done before the workers start. Raises NotFound.
    """
    from tuna.api import jobs, sessions
    from tuna.db.database import open_database
    from tuna.db.engine import reading
    from tuna.models import store

    with reading(open_database()) as connection:
        model = store.find(connection, name)
        known = len(store.winners(connection, model, winograd=winograd))
    session = sessions.init_session("tvm", SESSION, conditions={} if winograd else {"winograd": "no"})
    sessions.update_solvers("tvm")
    sessions.update_applicability(session.id, model.tag)
    loaded = jobs.load_jobs(session.id, tag=model.tag, reason=SESSION, options={"candidates": candidates})
    cores = sum(entry.task.core is not None for entry in model.manifest.tasks)
    tuned = TunedModel(model, session.id, cores, known, loaded.added)
    if on_start is not None:
        on_start(tuned)
    return replace(tuned, errored=jobs.run(session.id, on_progress=on_progress).errored)


def build_model(
    name: str,
    output: Path,
    *,
    session_id: int | None = None,
    winograd: bool = True,
    rivals: bool = True,
    seed: int = 0,
) -> BuiltModel:
    """Build an imported model into the shared library `output`, check and time it; `output` is only there if it is right.

    Kernels are the winners of the session, or of all sessions on such a machine, else those of similar tasks, else
    predicted. Raises NotFound, and BadInput if the answer differs from ONNX's reference by more than `TOLERANCE`.
    """
    from tuna.db.database import open_database
    from tuna.db.engine import reading
    from tuna.models import store
    from tuna.models.process import ModelProcess

    if not output.parent.is_dir():
        raise BadInput(f"There is no folder {output.parent}.")
    with reading(open_database()) as connection:
        model = store.find(connection, name)
        winners = store.winners(connection, model, session_id, winograd=winograd)
        alike = store.nearest(connection, model, session_id, winograd=winograd)
    manifest, temporary = model.manifest, output.with_name(f".{output.name}.new.so")
    common: dict[str, Any] = {"path": str(_file(model)), "shapes": manifest.shapes}
    records: dict[str, Any] = {key: [winner.solver, winner.params, None] for key, winner in winners.items()}
    records |= {key: [winner.solver, winner.params, task.to_json()] for key, (winner, task) in alike.items()}
    try:
        with ModelProcess(manifest.target) as process:
            made = process.call(
                "make", **common, target=manifest.target, records=records, winograd=winograd, output=str(temporary)
            )
        with ModelProcess(manifest.target) as process:  # another one: it has only what a user's program has
            checked = process.call("check", **common, library=str(temporary), seed=seed, rivals=rivals)
        if not checked["errors"]["reference"] <= TOLERANCE:
            raise BadInput(
                f"The built model differs from ONNX's reference by {checked['errors']['reference']:.2g} of the largest value.",
                hint="build it without Winograd: --no-winograd; if that fails too, it is a fault of Tuna or TVM",
            )
        temporary.replace(output)
    finally:
        temporary.unlink(missing_ok=True)
    built = _described(output, model, made, checked)
    Path(f"{output}.json").write_text(json.dumps(_facts(built), indent=1) + "\n")
    return built


def _described(output: Path, model: StoredModel, made: Mapping[str, Any], checked: Mapping[str, Any]) -> BuiltModel:
    from tuna.models.manifest import Class

    labels = {entry.task.key: entry.task.label for entry in model.manifest.tasks}
    spent: dict[Class, float] = defaultdict(float)
    by_label: dict[str, float] = defaultdict(float)
    runtime = 0.0
    for function, ms in checked["shares"].items():
        key = made["functions"].get(function)
        if key is None:
            runtime += ms
            continue
        spent[Class(made["classes"].get(key, Class.DEFAULT))] += ms
        by_label[labels.get(key, function)] += ms
    total = sum(spent.values()) + runtime
    numbers: dict[Class, int] = defaultdict(int)
    for key in set(made["functions"].values()):
        numbers[Class(made["classes"].get(key, Class.DEFAULT))] += 1
    return BuiltModel(
        output,
        model,
        checked["errors"],
        checked["times_ms"],
        dict(numbers),
        {kind: ms / total for kind, ms in spent.items()},
        runtime / total,
        dict(sorted(by_label.items(), key=lambda entry: -entry[1])),
        {labels.get(key, key): reason for key, reason in made["refused_records"].items()},
    )


def _facts(built: BuiltModel) -> dict[str, Any]:
    """What stands beside the library, for programs that load it."""
    return {
        "model": built.model.name,
        "version": built.model.version,
        "inputs": [value.model_dump(mode="json") for value in built.model.manifest.inputs],
        "target": json.loads(built.model.manifest.target),
        "tvm": built.model.manifest.tvm,
        "errors": dict(built.errors),
        "tasks": {str(kind): count for kind, count in built.tasks.items()},
    }


def _read(path: Path) -> bytes:
    if path.suffix != ".onnx":
        raise BadInput(f"{path.name} is no ONNX file.", hint="only *.onnx can be imported so far")
    try:
        return path.read_bytes()
    except OSError as error:
        raise BadInput(f"{path} cannot be read: {error.strerror}.") from None


def _artifacts() -> Artifacts:
    from tuna.artifacts import Artifacts
    from tuna.db import sessions
    from tuna.db.database import open_database
    from tuna.db.engine import reading
    from tuna.settings import get_settings

    with reading(open_database()) as connection:
        return Artifacts.from_settings(get_settings(), sessions.namespace(connection), sessions.secret(connection))


def _file(model: StoredModel) -> Path:
    try:
        return _artifacts().path(model.manifest.file)
    except KeyError:
        raise NotFound(
            f"The file of the model {model.name} is not in the artifact store any more.", hint="import it again"
        ) from None
