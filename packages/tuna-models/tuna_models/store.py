"""Imported models in SQL: rows of `model`, whose version is the digest of the manifest."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

import sqlalchemy as sa

from tuna.common.messages import choices
from tuna.db import configs, networks
from tuna.db.bulk import upsert
from tuna.db.models import (
    ConfigRow,
    ConfigTag,
    Job,
    KernelRow,
    Model,
    ModelConfig,
    SolverApplicability,
    SolverRow,
)
from tuna.errors import BadInput, NotFound
from tuna_models.manifest import Manifest

#: Framework of a manifest whose version has no name before it.
_FRAMEWORK = "onnx"
#: Shown digits of a version.
SHOWN = 12
#: Maximum of characters of a model's name: of a tag, without the version.
NAME_CHARS = 128 - SHOWN - 1


@dataclass(frozen=True)
class StoredModel:
    """An imported model."""

    name: str
    manifest: Manifest

    @property
    def version(self) -> str:
        """Digest of the manifest."""
        return self.manifest.digest

    @property
    def tag(self) -> str:
        """The tag that the configs of this import carry."""
        return tag_of(self.name, self.version)


def tag_of(name: str, version: str) -> str:
    """The tag of an import's configs."""
    return f"{name}@{version[:SHOWN]}"


def check_name(name: str) -> None:
    """Raise BadInput for what cannot be the name of a model."""
    if not name.strip() or len(name) > NAME_CHARS or "@" in name:
        raise BadInput(f"A model has a name of 1 to {NAME_CHARS} characters without @.")


def save(
    connection: sa.Connection, name: str, manifest: Manifest, bodies: Mapping[str, bytes]
) -> configs.Stored:
    """Store an import with its tasks as configs and their counts; repeating it changes nothing.

    Raises BadInput as `check_name` does.
    """
    check_name(name)
    data = manifest.to_bytes()
    row = {"digest": manifest.digest, "blob": data, "size_bytes": len(data)}
    upsert(connection, KernelRow, [row], key=("digest",))
    kind, _, version = manifest.opset.rpartition(" ")
    model = networks.Named(name, manifest.digest)
    framework = networks.Named(kind or _FRAMEWORK, version)
    networks.add_model(connection, model)
    networks.add_framework(connection, framework)
    tasks = [entry.task for entry in manifest.tasks]
    stored = configs.store(connection, tasks, tag_of(name, manifest.digest), bodies=bodies)
    weights = {
        config_id: entry.count
        for config_id, entry in zip(stored.ids, manifest.tasks, strict=True)
        if config_id is not None
    }
    networks.set_weights(connection, *networks.ids(connection, model, framework), 1, weights)
    return stored


def find(connection: sa.Connection, name: str) -> StoredModel:
    """Return the latest import under a name, or `name@version`; raises NotFound with all names."""
    wanted, _, version = name.partition("@")
    models = list_all(connection)
    for model in models:
        if model.name == wanted and model.version.startswith(version):
            return model
    hint = choices(wanted, (model.name for model in models), "models")
    raise NotFound(
        f"Unknown model {name!r}.",
        hint=f"{hint}; add one: `tuna model import NAME FILE`",
    )


def list_all(connection: sa.Connection) -> list[StoredModel]:
    """Every import, the latest first."""
    statement = (
        sa.select(Model.name, KernelRow.blob)
        .join(KernelRow, KernelRow.digest == Model.version)
        .order_by(Model.id.desc())
    )
    return [
        StoredModel(name, Manifest.from_bytes(blob)) for name, blob in connection.execute(statement)
    ]


def counts(connection: sa.Connection, model: StoredModel) -> dict[str, int]:
    """The number of other imports with each of the model's tasks, by its key."""
    others = (sa.func.count(sa.distinct(ModelConfig.model_id)) - 1).label("others")
    statement = (
        sa.select(ConfigRow.key, others)
        .join(ModelConfig, ModelConfig.config_id == ConfigRow.id)
        .where(ConfigRow.key.in_([entry.task.key for entry in model.manifest.tasks]))
        .group_by(ConfigRow.key)
    )
    return {row.key: row.others for row in connection.execute(statement)}


def tunable(
    connection: sa.Connection, model: StoredModel, session_id: int, *, winograd: bool
) -> dict[str, tuple[int, set[str], set[str]]]:
    """Return id, applicable solvers and solvers with a job of each tunable task, by its key."""
    pair = SolverApplicability
    of_pair = Job.config_id == pair.config_id, Job.solver_id == pair.solver_id
    statement = (
        sa.select(ConfigRow.key, ConfigRow.id, SolverRow.name, Job.id.label("job"))
        .select_from(pair)
        .join(ConfigRow, ConfigRow.id == pair.config_id)
        .join(SolverRow, sa.and_(SolverRow.id == pair.solver_id, SolverRow.valid.is_(True)))
        .join(ConfigTag, sa.and_(ConfigTag.config_id == pair.config_id, ConfigTag.tag == model.tag))
        .outerjoin(Job, sa.and_(Job.session_id == session_id, *of_pair))
        .where(pair.session_id == session_id)
    )
    if not winograd:
        statement = statement.where(SolverRow.algorithm != "Winograd")
    tasks: dict[str, tuple[int, set[str], set[str]]] = {}
    for key, config_id, solver, job in connection.execute(statement):
        _, solvers, loaded = tasks.setdefault(key, (config_id, set(), set()))
        solvers.add(solver)
        if job is not None:
            loaded.add(solver)
    return tasks
