"""Imported models in SQL: rows of `model`, whose version is the digest of the manifest."""

from __future__ import annotations

from collections.abc import Collection, Mapping
from dataclasses import dataclass
from typing import Any

import sqlalchemy as sa

from tuna.api.rows import (
    ConfigRow,
    ConfigTag,
    FindDb,
    Framework,
    GoldenEntry,
    Job,
    KernelRow,
    Model,
    ModelConfig,
    Search,
    SolverApplicability,
    SolverRow,
    configs,
    networks,
    parts,
    upsert,
    values_among,
)
from tuna.common.messages import choices
from tuna.configs.model import WholeModelConfig
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


@dataclass(frozen=True)
class Additions:
    """Rows that an import added."""

    model: bool  #: False for an import that is repeated
    framework: networks.Named | None
    config_ids: frozenset[int]
    kernels: frozenset[str]  #: Digests of the manifest and of bodies

    @property
    def added(self) -> int:
        """The number of tasks that were not stored before."""
        return len(self.config_ids)


def save(
    connection: sa.Connection, name: str, manifest: Manifest, bodies: Mapping[str, bytes]
) -> Additions:
    """Store an import with its tasks as configs and their counts; repeating it changes nothing.

    Raises BadInput as `check_name` does.
    """
    check_name(name)
    data, tasks = manifest.to_bytes(), [entry.task for entry in manifest.tasks]
    digests, keys = {manifest.digest, *bodies}, {task.key for task in tasks}
    kernels = values_among(connection, sa.select(KernelRow.digest), KernelRow.digest, digests)
    known = values_among(connection, sa.select(ConfigRow.key), ConfigRow.key, keys)
    row = {"digest": manifest.digest, "blob": data, "size_bytes": len(data)}
    upsert(connection, KernelRow, [row], key=("digest",))
    kind, _, version = manifest.opset.rpartition(" ")
    model = networks.Named(name, manifest.digest)
    framework = networks.Named(kind or _FRAMEWORK, version)
    is_new = networks.add_model(connection, model)
    is_first = networks.add_framework(connection, framework)
    stored = configs.store(connection, tasks, tag_of(name, manifest.digest), bodies=bodies)
    ids = dict(zip((task.key for task in tasks), stored.ids, strict=True))
    weights = {
        config_id: entry.count
        for entry in manifest.tasks
        if (config_id := ids[entry.task.key]) is not None
    }
    networks.set_weights(connection, *networks.ids(connection, model, framework), 1, weights)
    new = (config_id for key, config_id in ids.items() if key not in known)
    return Additions(
        is_new,
        framework if is_first else None,
        frozenset(config_id for config_id in new if config_id is not None),
        frozenset(digests - kernels),
    )


def forget(connection: sa.Connection, model: StoredModel, additions: Additions) -> bool:
    """Remove a new import again, with the rows that it added and that nothing else refers to.

    False, and nothing is removed, if the model as a whole has a job: what was measured stays.
    """
    query = sa.select(ConfigRow.id).join(ConfigTag, ConfigTag.config_id == ConfigRow.id)
    of_whole = ConfigTag.tag == model.tag, ConfigRow.kind == WholeModelConfig.kind
    whole = set(connection.execute(query.where(*of_whole)).scalars())
    measured = values_among(connection, sa.select(Job.config_id), Job.config_id, whole)
    if measured or not additions.model:
        return False
    connection.execute(sa.delete(ConfigTag).where(ConfigTag.tag == model.tag))
    of_model = Model.name == model.name, Model.version == model.version
    connection.execute(sa.delete(Model).where(*of_model))
    left = additions.config_ids | whole
    for row in (ConfigTag, ModelConfig, Job, Search, FindDb, GoldenEntry):
        left -= values_among(connection, sa.select(row.config_id), row.config_id, left)
    _delete(connection, ConfigRow.id, left)
    kernels = set(additions.kernels)
    for column in (ConfigRow.body, Model.version):
        kernels -= values_among(connection, sa.select(column), column, kernels)
    _delete(connection, KernelRow.digest, kernels)
    if additions.framework is not None:
        used = sa.select(ModelConfig.framework_id)
        name = Framework.name == additions.framework.name
        version = Framework.version == additions.framework.version
        connection.execute(sa.delete(Framework).where(name, version, Framework.id.not_in(used)))
    return True


def _delete(connection: sa.Connection, column: Any, values: Collection[Any]) -> None:
    for part in parts(sorted(values)):
        connection.execute(sa.delete(column.class_).where(column.in_(part)))


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
