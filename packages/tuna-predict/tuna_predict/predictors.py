"""The predictors that there are, which of them are used, and what they answer."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass, fields
from datetime import datetime
from typing import Any

import sqlalchemy as sa

from tuna.api.rows import kernel, predictor
from tuna.common.files import gunzip
from tuna.common.messages import choices
from tuna.configs import Config
from tuna.errors import BadInput, NotFound
from tuna_predict.predictor import Predictor, read_tables

#: Name with which no predictor is used.
BUILT_IN = "builtin"
#: Predictors that a process keeps in memory.
_MAX_KEPT = 8


@dataclass(frozen=True)
class StoredPredictor:
    """A predictor that was trained."""

    name: str
    library: str
    arch: str
    since: datetime | None
    seed: int
    library_version: str
    seen: str  #: SHA-256 of the trials
    trials: int
    layers: int
    model: str  #: digest of the artifact
    tables: str  #: likewise
    evaluation: Mapping[str, Any]  #: `tuna_predict.evaluation.Evaluation`
    in_answers: bool
    in_searches: bool
    created_at: datetime

    @property
    def used_in(self) -> str:
        """Where it is used, for people."""
        used = {"answers": self.in_answers, "searches": self.in_searches}
        return " and ".join(name for name, there in used.items() if there)


def read_all(connection: sa.Connection, *where: sa.ColumnElement[bool]) -> list[StoredPredictor]:
    """Return the predictors that meet the conditions, the latest first."""
    columns = [predictor.c[one.name] for one in fields(StoredPredictor)]
    query = sa.select(*columns).where(*where)
    query = query.order_by(predictor.c.created_at.desc(), predictor.c.name)
    return [
        StoredPredictor(**row._asdict() | {"evaluation": json.loads(row.evaluation)})
        for row in connection.execute(query)
    ]


def get(connection: sa.Connection, name: str) -> StoredPredictor:
    """Return the predictor of this name; raises NotFound."""
    predictors = read_all(connection)
    for stored in predictors:
        if stored.name == name:
            return stored
    names = [BUILT_IN, *(stored.name for stored in predictors)]
    raise NotFound(f"Unknown predictor {name!r}.", hint=choices(name, names, "predictors"))


def _latest(connection: sa.Connection, library: str) -> str:
    """Return the name of the predictor that was trained last; raises NotFound."""
    for one in read_all(connection, predictor.c.library == library):
        return one.name
    raise NotFound(
        f"There is no predictor for {library} yet.", hint="make one: `tuna predictor train`"
    )


def use(
    connection: sa.Connection, library: str, name: str, *, force: bool = False
) -> StoredPredictor | None:
    """Use a predictor in answers and searches instead of any other one of its library; without a
    name the latest of this library, and with `BUILT_IN` none.

    It is used in answers unless it is worse than the nearest layer's table, and in searches
    unless it is worse than the built-in prior, or with `force`. Raises BadInput if it is
    neither, NotFound.
    """
    name = name or _latest(connection, library)
    chosen = None if name == BUILT_IN else get(connection, name)
    others = predictor.c.library == (library if chosen is None else chosen.library)
    if chosen is not None:
        answers = chosen.evaluation["beats_nearest"]
        searches = chosen.evaluation["beats_built_in"] or force
        if not (answers or searches):
            raise BadInput(
                f"{name} is worse than the nearest layer's table in answers, and than the built-in"
                " prior in searches.",
                hint="train it from more layers; with --force it is used in searches",
            )
    none = {"in_answers": False, "in_searches": False}
    connection.execute(sa.update(predictor).where(others).values(none))
    if chosen is None:
        return None
    used = {"in_answers": answers, "in_searches": searches}
    connection.execute(sa.update(predictor).where(predictor.c.name == name).values(used))
    return get(connection, name)


@dataclass(frozen=True)
class Answering:
    """A predictor that answers for layers that were never tuned."""

    stored: StoredPredictor
    predictor: Predictor

    def predict(self, layer: Config, arch: str | None, device: str | None) -> dict[str, Any] | None:
        """Return the fields of a prediction; None without a similar layer."""
        prediction = self.predictor.predict(layer, arch, device or "")
        if prediction is None:
            return None
        known = self.stored.evaluation["answers"]
        return {
            "library": self.stored.library,
            "solver": prediction.solver,
            "params": prediction.name,
            "time_ms": prediction.time_ms,
            "low_ms": prediction.time_ms * known["low"],
            "high_ms": prediction.time_ms * known["high"],
            "nearest": list(prediction.nearest),
            "predictor": self.stored.name,
        }


class LoadedPredictors:
    """The predictors that answer, read once for each process."""

    def __init__(self) -> None:
        self._known: dict[tuple[str, str], Predictor] = {}

    def answering(self, connection: sa.Connection, library: str | None) -> list[Answering]:
        """Return those of a library, or of all; raises NotFound if there is none."""
        wanted = [] if library is None else [predictor.c.library == library]
        predictors = read_all(connection, predictor.c.in_answers.is_(True), *wanted)
        if not predictors:
            raise NotFound(
                f"No predictor answers for {library or 'any library'}.",
                hint="`tuna predictor train` makes one, `tuna predictor use` uses it",
            )
        return [Answering(stored, self._load(connection, stored)) for stored in predictors]

    def _load(self, connection: sa.Connection, stored: StoredPredictor) -> Predictor:
        key = stored.model, stored.tables
        if key not in self._known:
            query = sa.select(kernel.c.digest, kernel.c.blob).where(kernel.c.digest.in_(key))
            blobs = {row.digest: row.blob for row in connection.execute(query)}
            if len(self._known) >= _MAX_KEPT:
                self._known.clear()
            tables = read_tables(gunzip(blobs[stored.tables]))
            self._known[key] = Predictor(blobs[stored.model], tables)
        return self._known[key]
