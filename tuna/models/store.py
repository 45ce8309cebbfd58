"""Imported models in SQL: a row of `model` for each import, whose version is the digest of its manifest."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass

import sqlalchemy as sa

from tuna.configs import TaskConfig, from_json_text
from tuna.db import configs, networks
from tuna.db.baselines import is_no_baseline
from tuna.db.models import Config, Environment, FindDb, Kernel, Model, ModelConfig, Session, Solver
from tuna.db.upsert import upsert
from tuna.errors import BadInput, NotFound
from tuna.models.likeness import likeness
from tuna.models.manifest import Manifest
from tuna.sentences import choices

_FRAMEWORK = "onnx"
#: Digits of a version that people see.
SHOWN = 12


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


@dataclass(frozen=True)
class Winner:
    """The fastest measured kernel of a task."""

    solver: str
    params: str
    time_ms: float
    session_id: int


def tag_of(name: str, version: str) -> str:
    """The tag of an import's configs."""
    return f"{name}@{version[:SHOWN]}"


def save(connection: sa.Connection, name: str, manifest: Manifest, bodies: Mapping[str, bytes]) -> configs.Stored:
    """Store an import under a name, the tasks as configs with their counts; the same import again changes nothing."""
    if not name.strip() or len(name) > 128 - SHOWN - 1 or "@" in name:
        raise BadInput(f"A model has a name of 1 to {128 - SHOWN - 1} characters without @.")
    data = manifest.to_bytes()
    row = {"digest": manifest.digest, "blob": data, "size_bytes": len(data)}
    upsert(connection, Kernel, [row], key=("digest",))
    model, framework = networks.Named(name, manifest.digest), networks.Named(_FRAMEWORK, manifest.opset)
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
    """The latest import under a name, or that of `name@version`; raises NotFound with the names there are."""
    wanted, _, version = name.partition("@")
    for model in _all(connection):
        if model.name == wanted and model.version.startswith(version):
            return model
    hint = choices(wanted, (model.name for model in _all(connection)), "models")
    raise NotFound(f"There is no imported model {name!r}.", hint=f"{hint}; add one: `tuna model import NAME FILE`")


def list_all(connection: sa.Connection) -> list[StoredModel]:
    """Every import, the latest first."""
    return _all(connection)


def _all(connection: sa.Connection) -> list[StoredModel]:
    statement = (
        sa.select(Model.name, Kernel.blob).join(Kernel, Kernel.digest == Model.version).order_by(Model.id.desc())
    )
    return [StoredModel(name, Manifest.from_bytes(blob)) for name, blob in connection.execute(statement)]


def winners(
    connection: sa.Connection, model: StoredModel, session_id: int | None = None, *, winograd: bool = True
) -> dict[str, Winner]:
    """The fastest result of each task by its key: of one session, or of all on machines like the model's target.

    Results are measured ones; without `winograd` only those of direct sums.
    """
    keys = [entry.task.key for entry in model.manifest.tasks if entry.task.core is not None]
    found = _fastest(connection, model, Config.key.in_(keys), session_id, winograd)
    return {key: winner for key, (winner, _) in found.items()}


def nearest(
    connection: sa.Connection, model: StoredModel, session_id: int | None = None, *, winograd: bool = True
) -> dict[str, tuple[Winner, TaskConfig]]:
    """For each task without a result the winner of that one which is the most alike, and that task; see `likeness`."""
    there = _fastest(connection, model, Config.kind == TaskConfig.kind, session_id, winograd)
    known = [(winner, task) for winner, text in there.values() if isinstance(task := from_json_text(text), TaskConfig)]
    found: dict[str, tuple[Winner, TaskConfig]] = {}
    for entry in model.manifest.tasks:
        task = entry.task
        if task.core is None or task.key in there:
            continue
        distances = [(distance, place) for place, (_, other) in enumerate(known) if (distance := likeness(task, other))]
        if distances:
            found[task.key] = known[min(distances)[1]]
    return found


def _fastest(
    connection: sa.Connection,
    model: StoredModel,
    wanted: sa.ColumnElement[bool],
    session_id: int | None,
    winograd: bool,
) -> dict[str, tuple[Winner, str]]:
    """The fastest result of each config, and the config as JSON, by key."""
    statement = (
        sa.select(
            Config.key, Solver.name, FindDb.params, FindDb.time_ms, FindDb.session_id, Config.json, Environment.target
        )
        .join(Config, Config.id == FindDb.config_id)
        .join(Solver, Solver.id == FindDb.solver_id)
        .join(Session, Session.id == FindDb.session_id)
        .join(Environment, Environment.id == Session.environment_id)
        .where(wanted, FindDb.time_ms > 0, FindDb.simulated.is_(False), is_no_baseline())
        .where(Environment.library == "tvm", Environment.library_version == model.manifest.tvm)
        .order_by(FindDb.time_ms.desc())
    )
    if session_id is not None:
        statement = statement.where(FindDb.session_id == session_id)
    if not winograd:
        statement = statement.where(Solver.algorithm != "Winograd")
    same = json.loads(model.manifest.target)
    return {
        key: (Winner(solver, params, float(time_ms or 0.0), session), text)
        for key, solver, params, time_ms, session, text, target in connection.execute(statement)
        if json.loads(target) == same
    }


def counts(connection: sa.Connection, model: StoredModel) -> dict[str, int]:
    """In how many other imports each of the model's tasks occurs, by its key."""
    others = (sa.func.count(sa.distinct(ModelConfig.model_id)) - 1).label("others")
    statement = (
        sa.select(Config.key, others)
        .join(ModelConfig, ModelConfig.config_id == Config.id)
        .where(Config.key.in_([entry.task.key for entry in model.manifest.tasks]))
        .group_by(Config.key)
    )
    return {row.key: row.others for row in connection.execute(statement)}
