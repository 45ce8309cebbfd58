"""Models and frameworks in SQL, and the configs of each model."""

from __future__ import annotations

import json
from collections import defaultdict
from collections.abc import Mapping
from dataclasses import dataclass

import sqlalchemy as sa

from tuna.db.bulk import upsert
from tuna.db.models import Base, Framework, KernelRow, Model, ModelConfig, Search
from tuna.errors import BadInput, NotFound


@dataclass(frozen=True)
class Named:
    """A model or a framework by name and version."""

    name: str
    version: str

    def __str__(self) -> str:
        return f"{self.name} {self.version}"


def add_model(connection: sa.Connection, model: Named) -> bool:
    """Store a model; False if it exists already."""
    return _add(connection, Model, model)


def add_framework(connection: sa.Connection, framework: Named) -> bool:
    """Store a framework; False if it exists already."""
    return _add(connection, Framework, framework)


def _add(connection: sa.Connection, table: type[Model] | type[Framework], item: Named) -> bool:
    for what, value, limit in (("name", item.name, 128), ("version", item.version, 64)):
        if not value.strip() or len(value) > limit:
            raise BadInput(f"A {what} has 1 to {limit} characters, not {len(value)}.")
    if _id(connection, table, item) is not None:
        return False
    upsert(
        connection, table, [{"name": item.name, "version": item.version}], key=("name", "version")
    )
    return True


def _id(connection: sa.Connection, table: type[Model] | type[Framework], item: Named) -> int | None:
    return connection.execute(
        sa.select(table.id).where(table.name == item.name, table.version == item.version)
    ).scalar_one_or_none()


def _require(
    connection: sa.Connection, table: type[Model] | type[Framework], item: Named, flags: str
) -> int:
    found = _id(connection, table, item)
    if found is None:
        what = table.__tablename__
        there = ", ".join(str(known) for known in _all(connection, table)) or "none yet"
        raise NotFound(f"Unknown {what} {item}.", hint=f"add it with {flags}; known: {there}")
    return found


def _all(connection: sa.Connection, table: type[Base]) -> list[Named]:
    columns = table.__table__.c
    rows = connection.execute(
        sa.select(columns.name, columns.version).order_by(columns.name, columns.version)
    )
    return [Named(row.name, row.version) for row in rows]


def ids(connection: sa.Connection, model: Named, framework: Named) -> tuple[int, int]:
    """Ids of a model and a framework; raises NotFound for an unknown one."""
    return (
        _require(connection, Model, model, "--add_model NAME --md_version VERSION"),
        _require(connection, Framework, framework, "--add_framework NAME --fw_version VERSION"),
    )


def find(connection: sa.Connection, text: str) -> tuple[int, Named]:
    """The id and name of the model `NAME`, the latest of that name, or `NAME@VERSION`; raises
    NotFound."""
    name, _, version = text.partition("@")
    query = sa.select(Model.id, Model.name, Model.version).order_by(Model.id.desc())
    for row in connection.execute(query.where(Model.name == name)):
        if row.version.startswith(version):
            return row.id, Named(row.name, row.version)
    there = ", ".join(
        sorted(set(connection.execute(query.limit(20).with_only_columns(Model.name)).scalars()))
    )
    raise NotFound(f"Unknown model {text!r}.", hint=f"models: {there or 'none yet'}")


def ids_of(connection: sa.Connection, text: str) -> list[int]:
    """The ids of every model `NAME`, or of `NAME@VERSION`; raises NotFound."""
    name, _, version = text.partition("@")
    query = sa.select(Model.id, Model.version).where(Model.name == name)
    found = [row.id for row in connection.execute(query) if row.version.startswith(version)]
    return found or [find(connection, text)[0]]


def weights(connection: sa.Connection, model_id: int) -> dict[int, int]:
    """Return how often each config occurs in the model; of several frameworks or numbers of GPUs
    the largest counts."""
    query = sa.select(ModelConfig.config_id, sa.func.max(ModelConfig.weight)).group_by(
        ModelConfig.config_id
    )
    rows = connection.execute(query.where(ModelConfig.model_id == model_id))
    return {config_id: int(weight) for config_id, weight in rows}


def set_weights(
    connection: sa.Connection,
    model_id: int,
    framework_id: int,
    gpu_count: int,
    weights: Mapping[int, int],
) -> None:
    """Set how often each config occurs in the model (`weights`: config id -> count); idempotent."""
    rows = [
        {
            "model_id": model_id,
            "framework_id": framework_id,
            "config_id": config_id,
            "gpu_count": gpu_count,
            "weight": weight,
        }
        for config_id, weight in weights.items()
    ]
    upsert(
        connection,
        ModelConfig,
        rows,
        key=("model_id", "framework_id", "config_id", "gpu_count"),
        update=("weight",),
    )


def models(connection: sa.Connection) -> list[tuple[Named, int]]:
    """Every model with its number of distinct configs."""
    statement = (
        sa.select(Model.name, Model.version, sa.func.count(sa.distinct(ModelConfig.config_id)))
        .outerjoin(ModelConfig, ModelConfig.model_id == Model.id)
        .group_by(Model.id, Model.name, Model.version)
        .order_by(Model.name, Model.version)
    )
    return [(Named(name, version), count) for name, version, count in connection.execute(statement)]


def occurrences(connection: sa.Connection) -> dict[int, dict[str, int]]:
    """Return how often each config occurs in each model (`NAME VERSION`).

    A model that was imported for several frameworks or numbers of GPUs counts once, with the
    largest weight.
    """
    query = (
        sa.select(ModelConfig.config_id, Model.name, Model.version, sa.func.max(ModelConfig.weight))
        .join(Model, Model.id == ModelConfig.model_id)
        .group_by(ModelConfig.config_id, Model.id, Model.name, Model.version)
    )
    found: dict[int, dict[str, int]] = defaultdict(dict)
    for config_id, name, version, weight in connection.execute(query):
        found[config_id][str(Named(name, version))] = int(weight)
    return found


def files(connection: sa.Connection) -> set[str]:
    """The artifacts that the manifests of imported models name: their files, and the texts of their
    modules."""
    query = sa.select(KernelRow.blob).join(Model, Model.version == KernelRow.digest).distinct()
    manifests = [json.loads(blob) for blob in connection.execute(query).scalars()]
    found = {manifest[name] for manifest in manifests for name in ("file", "text")}
    return found.union(*(manifest.get("data", {}).values() for manifest in manifests))


def frameworks(connection: sa.Connection) -> list[Named]:
    """Every framework."""
    return _all(connection, Framework)


def searched_weights(connection: sa.Connection, session_id: int) -> dict[int, float]:
    """Return how often models run each config that the session searches for."""
    configs = sa.select(Search.config_id).where(Search.session_id == session_id)
    query = (
        sa.select(ModelConfig.config_id, sa.func.sum(ModelConfig.weight))
        .where(ModelConfig.config_id.in_(configs))
        .group_by(ModelConfig.config_id)
    )
    return {config_id: float(weight) for config_id, weight in connection.execute(query)}
