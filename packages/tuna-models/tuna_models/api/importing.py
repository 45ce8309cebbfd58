"""Models: import them, list them, show their tasks."""

from __future__ import annotations

import contextlib
import hashlib
import tempfile
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from tuna.api.rows import configs, open_database, reading, writing
from tuna.api.services import artifacts_of_models, remove_unneeded
from tuna.artifacts.store import Artifacts
from tuna.common.messages import nearest
from tuna.configs import Workload
from tuna.errors import BadInput
from tuna_models.child_answers import AskedFile, ReadModel, WeightFiles
from tuna_models.manifest import Manifest, Precision
from tuna_models.process import ModelProcess
from tuna_models.source import MODEL_ENDINGS
from tuna_models.work import files, known_kernels, store
from tuna_models.work.known_kernels import Winner
from tuna_models.work.session import ModelWork, open_work
from tuna_models.work.store import StoredModel


@dataclass(frozen=True)
class ImportedModel:
    """An import: the model, and the rows that it added."""

    model: StoredModel
    additions: store.Additions


@dataclass(frozen=True)
class ModelTask:
    """A task of a model, and what is known of it."""

    label: str
    key: str
    count: int
    core: bool
    models: int  #: number of other imports with this task
    winner: Winner | None


def import_model(
    name: str,
    path: Path,
    *,
    batch: int | None = None,
    shapes: Mapping[str, Sequence[int]] | None = None,
    values: Mapping[str, Sequence[float]] | None = None,
    session_id: int | None = None,
    precision: Precision | str = Precision.FP32,
    work: ModelWork | None = None,
    start_workers: bool = False,
) -> ImportedModel:
    """Import an ONNX file, or a program of `torch.export`, under a name: its tasks become configs
    with their counts.

    They are those for the target of the session's environment, by default of this machine's: of
    the cores of TUNA_EVAL_CPUS, else of all that this process can keep busy.
    `batch` is the first extent of each input that `shapes` does not name; `shapes` may also have
    one value for the name of an open extent. Inputs with `values`, in the order of memory, become
    constants. Weights in files of their own are taken from the model's folder. With the `precision`
    bf16 its convolutions and products are computed in bf16: that is another version of the model,
    with tasks of its own. `work`: where it is done, if that is open already; `start_workers`: those
    that will measure get ready meanwhile, once the file could be read.

    Raises BadInput for a file that cannot be imported, with all the operators and open extents that
    are in the way, and for a target that lacks the precision; LibraryMissing without TVM or onnx.
    """
    store.check_name(name)
    data = read_model(path)
    with contextlib.ExitStack() as stack:
        opened = work or stack.enter_context(open_work(session_id, model=""))
        process = opened.process(path.name)
        engine = open_database()
        folder = Path(tempfile.mkdtemp(dir=opened.workspace.folder))
        text, copy = folder / "module.py", folder / "model" / path.name
        beside = lay_out(process, path, data, copy)
        del data  # the child needs the memory
        if start_workers:
            opened.start_workers()
        asked = AskedFile(
            path=str(copy),
            target=opened.target,
            shapes=shapes or {},
            values=values or {},
            batch=batch,
            precision=Precision(precision),
        )
        contents = process.call(
            ReadModel, "inspect", asked=asked.model_dump(mode="json"), text=str(text)
        )
        for entry in contents.tasks:  # so that nothing of a model that is refused stays behind
            configs.computed_columns(entry.task)
        artifacts = artifacts_of_models()
        manifest = Manifest(
            file=_put(artifacts, copy),
            data={place: _put(artifacts, weights) for place, weights in beside.items()},
            size_bytes=sum(each.stat().st_size for each in (copy, *beside.values())),
            opset=contents.opset,
            shapes={value.name: value.shape for value in contents.inputs},
            values={key: tuple(value) for key, value in asked.values.items()},
            target=opened.target,
            tvm=contents.tvm,
            inputs=contents.inputs,
            tasks=contents.tasks,
            text=artifacts.put(text.read_bytes()),
            left_in_fp32=contents.left_in_fp32,
            precision=Precision(precision),
        )
        opened.workspace.keep(manifest.digest, copy)
    bodies = {digest: body.encode() for digest, body in contents.bodies.items()}
    assert all(hashlib.sha256(body).hexdigest() == digest for digest, body in bodies.items())
    with writing(engine) as connection:
        additions = store.save(connection, name, manifest, bodies)
    return ImportedModel(store.StoredModel(name, manifest), additions)


@contextlib.contextmanager
def forgotten_if_refused(imported: ImportedModel) -> Iterator[None]:
    """Remove a new import again if the `with` block raises BadInput before the model as a whole
    had a job: a file that is refused leaves nothing."""
    try:
        yield
    except BadInput:
        with writing(open_database()) as connection:
            forgotten = store.forget(connection, imported.model, imported.additions)
        if forgotten:
            manifest = imported.model.manifest
            remove_unneeded({manifest.file, manifest.text, *manifest.data.values()})
        raise


def list_models() -> list[StoredModel]:
    """Every import, the latest first."""
    with reading(open_database()) as connection:
        return store.list_all(connection)


def show_model(name: str) -> tuple[StoredModel, list[ModelTask]]:
    """The latest import under a name with its tasks; raises NotFound."""
    with reading(open_database()) as connection:
        model = store.find(connection, name)
        winners, shared = (
            known_kernels.winners(connection, model.manifest, known_kernels.ResultScope()),
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


def model_workloads(name: str) -> list[Workload]:
    """The tasks of the latest import under a name, with the texts of those without a core; raises
    NotFound."""
    with reading(open_database()) as connection:
        model = store.find(connection, name)
        return [
            Workload(task, configs.body(connection, task.body) if task.body else None)
            for task in (entry.task for entry in model.manifest.tasks)
        ]


def _put(artifacts: Artifacts, path: Path) -> str:
    with path.open("rb") as file:
        return artifacts.put_file(file)


def lay_out(process: ModelProcess, path: Path, data: bytes, copy: Path) -> dict[str, Path]:
    """Write a model and its weights to `copy` and beside it; returns the files of weights by their
    places.

    Raises BadInput for a file that is not a model, and for weights that cannot be read.
    """
    files.write(copy, data)
    places = process.call(WeightFiles, "locations", path=str(copy)).locations
    beside = {place: copy.parent / place for place in places}
    for place, weights in beside.items():
        files.write(weights, files.read_beside(path, place))
    return beside


def read_model(path: Path) -> bytes:
    """Return the bytes of a model's file; raises BadInput, also for a name that ends as no model's
    does."""
    if path.suffix.lower() not in MODEL_ENDINGS:
        near = nearest(path.suffix, MODEL_ENDINGS)
        raise BadInput(
            f"{path.name} is not a model that can be imported.",
            hint=f"{f'did you mean {near}? ' if near else ''}*.onnx, or *.pt2 as torch.export.save"
            " writes it",
        )
    return files.read(path)
