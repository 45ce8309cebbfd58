"""Times of whole models in SQL: a row for each model and set of open extents; those of one lease
share their run."""

from __future__ import annotations

import uuid
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, fields
from datetime import datetime
from typing import Any

import sqlalchemy as sa

from tuna.db.models import Benchmark, FindDb, Model, ModelConfig

#: Maximum of rows in a list or report, the latest ones
_MAX_ROWS = 500
#: Number of digits of a model's version that are shown
_VERSION_CHARS = 12
#: Texts that are cut to the lengths of their columns
_CHARS = {"label": 255, "function": 128, "tracker": 255, "device": 255}


@dataclass(frozen=True, kw_only=True)
class _Measurement:
    label: str  #: name of the model's file
    artifact: str  #: SHA-256 of the model's file
    function: str
    tracker: str  #: address of the TVM RPC tracker; empty: measured on this machine
    device: str  #: device key of the board, or the name of this machine's CPU
    extents: Mapping[str, int]
    inputs: str  #: input extents as the user gave them, separated by spaces
    time_ms: float  #: median of the repeats
    low_ms: float  #: lower end of the median's 95 % interval
    high_ms: float
    repeats: int
    noisy: bool
    #: largest difference from the first model of the run, relative to the largest magnitude of its
    #: answer; None: not finite, or the shapes differ
    error: float | None


@dataclass(frozen=True, kw_only=True)
class NewBenchmark(_Measurement):
    """The measurement of one model at one point."""

    model_id: int | None  #: id of the import that it was built from; None: not known


@dataclass(frozen=True, kw_only=True)
class ModelTime(_Measurement):
    """A row, with the first model of its run at the same point, which it was timed in turn with."""

    run: str
    model: str  #: `name@version` of the import; empty: not known
    first: str  #: label of the first model
    first_ms: float
    measured_at: datetime

    @property
    def where(self) -> str:
        """The device, with its tracker if it has one."""
        return f"{self.device} at {self.tracker}" if self.tracker else self.device

    @property
    def name(self) -> str:
        """The file, with the import that it was built from."""
        return f"{self.label} ({self.model})" if self.model else self.label

    @property
    def ratio(self) -> float:
        """Its time over that of the first model."""
        return self.time_ms / self.first_ms

    def as_json(self) -> dict[str, Any]:
        """For programs."""
        found = {"run": self.run, "model": self.model, **asdict(self)}
        return {**found, "measured_at": self.measured_at.isoformat(), "ratio": self.ratio}


def new_run() -> str:
    """The name of a run."""
    return str(uuid.uuid4())


def store(connection: sa.Connection, run: str, rows: Sequence[NewBenchmark]) -> None:
    """Add rows to a run, in their order."""
    query = sa.select(sa.func.count()).select_from(Benchmark).where(Benchmark.run == run)
    first = connection.execute(query).scalar_one()
    values = [
        {
            **{"run": run, "number": first + number, **asdict(row)},
            **{name: getattr(row, name)[:chars] for name, chars in _CHARS.items()},
        }
        for number, row in enumerate(rows)
    ]
    connection.execute(sa.insert(Benchmark), values)


def model_id(connection: sa.Connection, name: str, version: str) -> int | None:
    """The id of an import; None if it is not in this database."""
    query = sa.select(Model.id).where(Model.name == name, Model.version == version)
    return connection.execute(query).scalar_one_or_none()


def of_run(connection: sa.Connection, run: str) -> list[ModelTime]:
    """The rows of a run, in their order."""
    return _read(connection, Benchmark.run == run, most=None)


def of_models(connection: sa.Connection, model_ids: Sequence[int] | None = None) -> list[ModelTime]:
    """The latest rows of all runs, or of those in which one of these imports took part, in the
    order of their measurement."""
    return (
        _read(connection)
        if model_ids is None
        else _with(connection, Benchmark.model_id.in_(model_ids))
    )


def of_session(connection: sa.Connection, session_id: int) -> list[ModelTime]:
    """The latest rows of runs with an import that has layers with a result in the session."""
    models = (
        sa.select(ModelConfig.model_id)
        .join(FindDb, FindDb.config_id == ModelConfig.config_id)
        .where(FindDb.session_id == session_id)
    )
    return _with(connection, Benchmark.model_id.in_(models))


def _with(connection: sa.Connection, condition: sa.ColumnElement[bool]) -> list[ModelTime]:
    """The latest rows of runs that have a row for which the condition holds."""
    return _read(connection, Benchmark.run.in_(sa.select(Benchmark.run).where(condition)))


def _read(
    connection: sa.Connection, *conditions: sa.ColumnElement[bool], most: int | None = _MAX_ROWS
) -> list[ModelTime]:
    query = (
        sa.select(Benchmark, Model.name, Model.version)
        .outerjoin(Model, Model.id == Benchmark.model_id)
        .where(*conditions)
        .order_by(Benchmark.id.desc())
        .limit(most)
    )
    rows = list(connection.execute(query))[::-1]
    firsts: dict[tuple[str, str], Any] = {}
    return [
        ModelTime(
            run=row.run,
            model=f"{row.name}@{row.version[:_VERSION_CHARS]}" if row.name else "",
            **{field.name: getattr(row, field.name) for field in fields(_Measurement)},
            first=first.label,
            first_ms=first.time_ms,
            measured_at=row.created_at,
        )
        for row in rows
        for first in [firsts.setdefault((row.run, str(sorted(row.extents.items()))), row)]
    ]
