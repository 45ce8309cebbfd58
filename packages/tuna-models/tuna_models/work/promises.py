"""Imports in bf16 that leave in fp32 what keeps the error of their answers."""

from __future__ import annotations

from pathlib import Path

from tuna.api.rows import open_database, writing
from tuna.api.services import artifacts_of_models
from tuna_models.child_answers import AskedFile, ReadModel
from tuna_models.judging.checks import Checks
from tuna_models.manifest import Precision, Promise
from tuna_models.work import store
from tuna_models.work.checked_build import Build
from tuna_models.work.session import ModelWork, planned_for
from tuna_models.work.store import StoredModel


def keep_error(
    model: StoredModel, work: ModelWork, checks: Checks, *, built_error: float = 0.0
) -> StoredModel:
    """The import that keeps `checks.max_error`: of a model in bf16 one that leaves as much in fp32
    as that needs, an import of its own under the same name. All of it is in bf16 where an error as
    large as the answers is allowed.

    With `built_error` more stays in fp32 than in this import, which was built and was off by that.
    """
    manifest = model.manifest
    if manifest.precision is not Precision.BF16:
        return model
    known, promise = manifest.promise, None
    if known is not None and known.max_error == checks.max_error and not built_error:
        return model
    if checks.max_error < 1:
        build = Build(work, model, planned_for(manifest, work), {}, True, checks)
        with work.workspace.new_folder() as folder:
            promise = build.promise(Path(folder), built_error)
    if promise is not None and not promise.left:
        promise = None
    return model if promise == known else _planned(model, work, promise)


def _planned(model: StoredModel, work: ModelWork, promise: Promise | None) -> StoredModel:
    """Import the model's file again, with this left in fp32."""
    manifest, artifacts = model.manifest, artifacts_of_models()
    path = work.workspace.file_of(model)
    asked = AskedFile(
        path=str(path),
        target=manifest.target,
        shapes=manifest.shapes,
        values=manifest.values,
        precision=manifest.precision,
        in_fp32=() if promise is None else promise.places,
    )
    with work.workspace.new_folder() as folder:
        text = Path(folder) / "module.py"
        contents = work.process(model.name).call(
            ReadModel, "inspect", asked=asked.model_dump(mode="json"), text=str(text)
        )
        written = artifacts.put(text.read_bytes())
    planned = StoredModel(
        model.name,
        manifest.model_copy(
            update={
                "tvm": contents.tvm,
                "tasks": contents.tasks,
                "text": written,
                "left_in_fp32": contents.left_in_fp32,
                "promise": promise,
            }
        ),
    )
    bodies = {digest: body.encode() for digest, body in contents.bodies.items()}
    with writing(open_database()) as connection:
        store.save(connection, planned.name, planned.manifest, bodies)
    work.workspace.keep(planned.version, path)
    return planned
