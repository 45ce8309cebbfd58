"""The fastest known result of each of some layers, else that of the most similar layer."""

from __future__ import annotations

import contextlib
import enum
import functools
import re
import threading
import time
from collections import defaultdict
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal, Protocol

import numpy as np
import sqlalchemy as sa
from numpy.typing import NDArray

from tuna.configs import Config, from_json_text, read_line
from tuna.configs.similarity import family, log_sizes
from tuna.db.bulk import parts, values_among
from tuna.errors import BadInput, NotFound
from tuna.plugins import Plugins
from tuna.results.core_tables import config, environment
from tuna.results.selectable import BOTH, Results
from tuna.vocabulary import PREDICTED

#: Maximum of layers in one question
MAX_LAYERS = 1000
#: Maximum of configs that are read at once
_BATCH = 5000
#: Number of similar configs that are looked at, with the maximum of layers for which that is done;
#: then all that have results
_NEAREST = ((8, MAX_LAYERS), (256, 32))
#: Maximum difference of distances that count as equal
_ALIKE = 1e-9
#: Seconds for which environments of a scope are remembered, and maximum of such scopes
_SCOPE_S, _MAX_SCOPES = 1.0, 1000
_KEY = re.compile("[0-9a-f]{64}", re.ASCII)
#: Fields of a result, named as in rows of `tuna query`
_FIELDS = (
    *("layer", "config_key", "kind", "driver", "library", "solver", "params", "time_ms"),
    *("low_ms", "high_ms", "noisy", "arch", "environment", "library_version", "session_id"),
    *("golden", "kept_at"),
)


class Cover(str, enum.Enum):
    """A layer's class, by the results that there are."""

    EXACT = "exact"  #: a result of the layer on such a device
    NEAR = "near"  #: a result of a layer that differs in sizes alone
    NONE = "none"  #: no result

    __str__ = str.__str__


@dataclass(frozen=True)
class Scope:
    """Environments that are asked about; None: any."""

    arch: str | None = None
    device: str | None = None  #: text that the device's name contains
    library: str | None = None


@dataclass(frozen=True)
class BestResult:
    """A layer that was asked for, with the fastest result of it or of the most similar layer, or a
    prediction."""

    asked: str  #: layer in the words of the question
    cover: Cover | Literal["predicted"]
    result: Mapping[str, Any] | None  #: fields as in `tuna query`; a prediction has its own


def best(
    connection: sa.Connection,
    asked: Sequence[str],
    scope: Scope,
    index: LayerIndex,
    *,
    predict: bool = False,
) -> list[BestResult]:
    """Return an answer for each layer, which is a whole config key, a driver command or JSON.

    Results are timed ones of sessions, imports and golden versions, simulated ones left out. Raises
    BadInput for a text that names no layer, or several; NotFound for a scope without a session.

    `predict`: a layer that was not measured gets the prediction of a trained predictor, where there
    is a similar layer; NotFound if no predictor answers.
    """
    if not 1 <= len(asked) <= MAX_LAYERS:
        raise BadInput(f"1 to {MAX_LAYERS} layers can be asked for, not {len(asked)}.")
    named = {text: text if _KEY.fullmatch(text) else _layer(text) for text in asked}
    keys = {text: layer if isinstance(layer, str) else layer.key for text, layer in named.items()}
    environments = index.environments(connection, scope)
    exact = fastest(connection, environments, "config_key", list(keys.values()), _FIELDS)
    layers = [cfg for cfg in named.values() if isinstance(cfg, Config) and cfg.key not in exact]
    predicted = index.predicted(connection, layers, scope) if predict else {}
    layers = [layer for layer in layers if layer not in predicted]
    near = nearest(connection, environments, layers, index, _FIELDS) if layers else {}
    answers = {}
    for text, layer in named.items():
        row, cover = exact.get(keys[text]), Cover.EXACT
        if row is None and isinstance(layer, Config):
            row, cover = near.get(layer), Cover.NEAR
        if row is None and layer in predicted:
            answers[text] = BestResult(text, PREDICTED, predicted[layer])
            continue
        document = None if row is None else result_document(row, _FIELDS)
        answers[text] = BestResult(text, Cover.NONE if row is None else cover, document)
    return [answers[text] for text in asked]


def _layer(text: str) -> Config:
    layers = read_line(text)
    if len(layers) != 1:
        raise BadInput(
            f"{text[:200]!r} names {len(layers)} layers.", hint="ask for one: -F 1 of a convolution"
        )
    return layers[0]


def result_document(row: Any, fields: Sequence[str]) -> dict[str, Any]:
    """Return these fields of a result, `kept_at` among them, as rows of `tuna query` have them."""
    document = {name: getattr(row, name) for name in fields if name != "kept_at"}
    document |= {name: bool(document[name]) for name in ("noisy", "simulated") if name in document}
    return document | {"measured_at": row.kept_at.isoformat() if row.kept_at else None}


def find_environments(connection: sa.Connection, scope: Scope) -> list[int]:
    """Return the ids of environments; raises NotFound if there is none."""
    query = sa.select(environment.c.id)
    if scope.arch is not None:
        query = query.where(environment.c.arch == scope.arch)
    if scope.device is not None:
        described = sa.func.lower(environment.c.device)
        query = query.where(sa.func.instr(described, scope.device.lower()) > 0)
    if scope.library is not None:
        query = query.where(environment.c.library == scope.library)
    found = list(connection.execute(query).scalars())
    if not found:
        there = sorted(connection.execute(sa.select(environment.c.arch).distinct()).scalars())
        what = " ".join(filter(None, (scope.arch, scope.device, scope.library))) or "any device"
        raise NotFound(
            f"No session was tuned for {what}.",
            hint=f"architectures: {', '.join(there) or 'none yet'}",
        )
    return found


def _measured(results: Results) -> Results:
    """Return the results that were measured in some environments, a parameter."""
    # the sum keeps databases from beginning with all results of an environment
    here = (results["environment_id"] + 0).in_(_ENVIRONMENTS)
    return results.only(here, *results.measured, by=["environment_id"])


_ENVIRONMENTS: sa.BindParameter[Any] = sa.bindparam("environments", expanding=True)
_VALUES: sa.BindParameter[Any] = sa.bindparam("named", expanding=True)


@functools.cache  # to build them costs more than to run them
def _fastest(column: str, fields: tuple[str, ...]) -> list[sa.Select[Any]]:
    found = []
    columns = dict.fromkeys((column, "time_ms", "solver", *fields))
    for results in BOTH:
        measured = _measured(results)
        place = sa.func.row_number().over(
            partition_by=measured["config_id"], order_by=(measured["time_ms"], measured["solver"])
        )
        ranked = measured.select("id", by=(column, "solver")).add_columns(place.label("place"))
        first = ranked.where(measured[column].in_(_VALUES)).subquery()
        query = results.select(*columns).join(first, first.c.id == results["id"])
        found.append(query.where(first.c.place == 1))
    return found


def fastest(
    connection: sa.Connection,
    environments: Sequence[int],
    column: Literal["config_id", "config_key"],
    values: Collection[Any],
    fields: Sequence[str],
) -> dict[Any, Any]:
    """Return the fastest result of each config that is named by a column, with its fields."""
    found: dict[Any, Any] = {}
    for part in parts(sorted(set(values))):
        for query in _fastest(column, tuple(fields)):
            for row in connection.execute(query, {"environments": environments, "named": part}):
                key = getattr(row, column)
                before = found.get(key)
                if before is None or (row.time_ms, row.solver) < (before.time_ms, before.solver):
                    found[key] = row
    return found


def _with_results(
    connection: sa.Connection, environments: Sequence[int], ids: Collection[int] | None = None
) -> set[int]:
    """Return the configs that have a result, of some or of all."""
    found: set[int] = set()
    for results in BOTH:
        measured = _measured(results)
        query = measured.select("config_id").distinct().params(environments=environments)
        if ids is None:
            found.update(connection.execute(query).scalars())
        else:
            found |= values_among(connection, query, measured["config_id"], ids)
    return found


class LayerPredictor(Protocol):
    """A predictor that answers for layers that were never tuned."""

    def predict(self, layer: Config, arch: str | None, device: str | None) -> dict[str, Any] | None:
        """Return the fields of a prediction; None without a similar layer."""


class Predictors(Protocol):
    """The predictors that answer, each read from the database once for an object of this class."""

    def answering(self, connection: sa.Connection, library: str | None) -> Sequence[LayerPredictor]:
        """Return those of a library, or of all; raises NotFound if there is none."""


#: Classes of `Predictors`, made without arguments
PREDICTORS: Plugins[type[Any]] = Plugins("tuna.predictors", "predictor", type)


class LayerIndex:
    """The configs of a database by similarity, and which environments there are; kept from one
    question to the next. Configs never change, so only new ones are read."""

    def __init__(self) -> None:
        self._reading = threading.Lock()
        self._last_id = 0
        self._families: dict[tuple[object, ...], _Family] = {}
        self._environments: dict[Scope, tuple[float, list[int]]] = {}

    @functools.cached_property
    def _predictors(self) -> list[Predictors]:
        """The predictors that packages bring, made once; raises NotFound if none does."""
        if not (classes := PREDICTORS.all().values()):
            raise NotFound(
                "Predictions need the package tuna-predict.", hint="pip install tuna-predict"
            )
        return [made() for made in classes]

    def predicted(
        self, connection: sa.Connection, layers: Sequence[Config], scope: Scope
    ) -> dict[Config, Mapping[str, Any]]:
        """Return the fastest prediction for each layer that has one; raises NotFound if no
        predictor answers."""
        there = [
            one for each in self._predictors for one in each.answering(connection, scope.library)
        ]
        found: dict[Config, Mapping[str, Any]] = {}
        for layer in layers:
            each = (one.predict(layer, scope.arch, scope.device) for one in there)
            if known := [one for one in each if one is not None]:
                found[layer] = min(known, key=lambda one: (one["time_ms"], one["predictor"]))
        return found

    def environments(self, connection: sa.Connection, scope: Scope) -> list[int]:
        """Return ids of environments as they were a moment ago; raises NotFound if there is
        none."""
        read_at, found = self._environments.get(scope, (0.0, []))
        if not found or time.monotonic() - read_at > _SCOPE_S:
            found = find_environments(connection, scope)
            if len(self._environments) >= _MAX_SCOPES:
                self._environments.clear()
            self._environments[scope] = time.monotonic(), found
        return found

    def refresh(self, connection: sa.Connection) -> None:
        """Read the configs that came since."""
        with self._reading:
            while True:
                query = sa.select(config.c.id, config.c.json).where(config.c.id > self._last_id)
                rows = connection.execute(query.order_by(config.c.id).limit(_BATCH)).all()
                added: dict[tuple[object, ...], list[tuple[int, Config]]] = defaultdict(list)
                for number, text in rows:
                    with contextlib.suppress(BadInput):  # of a kind that is not installed
                        layer = from_json_text(text)
                        if (like := family(layer)) is not None:
                            added[like].append((number, layer))
                for like, layers in added.items():
                    more, before = _Family.of(layers), self._families.get(like)
                    self._families[like] = more if before is None else before + more
                if rows:
                    self._last_id = rows[-1].id
                if len(rows) < _BATCH:
                    return

    def nearest(
        self, layers: Iterable[Config], most: int, among: Collection[int] | None = None
    ) -> dict[Config, list[int]]:
        """Return for each layer ids of similar configs, the nearest first, `most` of them at most;
        `among`: only of these. A layer's own is not among them; one without any is left out."""
        alike: dict[tuple[object, ...], list[Config]] = defaultdict(list)
        for layer in layers:
            if (like := family(layer)) in self._families and like is not None:
                alike[like].append(layer)
        found: dict[Config, list[int]] = {}
        for like, those in alike.items():
            there = self._families[like]
            if among is not None:
                there = there.only(among)
            found |= there.nearest(those, most)
        return {layer: ids for layer, ids in found.items() if ids}


@dataclass(frozen=True)
class _Family:
    """Similar configs."""

    ids: NDArray[np.int64]
    labels: tuple[str, ...]
    sizes: NDArray[np.float64]  #: logarithms of the sizes; one size of all configs after the other

    @classmethod
    def of(cls, layers: Sequence[tuple[int, Config]]) -> _Family:
        """Return configs with their ids."""
        return cls(
            np.array([number for number, _ in layers]),
            tuple(layer.label for _, layer in layers),
            np.ascontiguousarray(np.array([log_sizes(layer) for _, layer in layers]).T),
        )

    def __add__(self, other: _Family) -> _Family:
        return _Family(
            np.concatenate((self.ids, other.ids)),
            self.labels + other.labels,
            np.concatenate((self.sizes, other.sizes), axis=1),
        )

    def only(self, ids: Collection[int]) -> _Family:
        """Return those with one of these ids."""
        places = np.flatnonzero(np.isin(self.ids, np.fromiter(ids, np.int64, len(ids))))
        labels = tuple(self.labels[place] for place in places.tolist())
        return _Family(self.ids[places], labels, self.sizes[:, places])

    def nearest(self, layers: Iterable[Config], most: int) -> dict[Config, list[int]]:
        """Return ids of the nearest of each of some layers of the family."""
        # arrays of this size are not had for nothing: they are written anew for each layer
        ratios, distances = np.empty_like(self.sizes), np.empty(len(self.ids))
        ordered, similar = np.empty_like(distances), {}
        for layer in layers:
            np.subtract(self.sizes, np.array(log_sizes(layer))[:, None], out=ratios)
            np.abs(ratios, out=ratios).sum(axis=0, out=distances)
            farthest = np.inf
            if len(distances) > most + 1:  # with its own
                ordered[:] = distances
                ordered.partition(most)
                farthest = ordered[most] + _ALIKE
            # rounded, so that equal ones are ordered by label
            order = sorted(
                (round(float(distances[place]) / _ALIKE), self.labels[place], int(self.ids[place]))
                for place in np.flatnonzero(distances <= farthest).tolist()
                if distances[place] > _ALIKE
            )
            similar[layer] = [number for _, _, number in order[:most]]
        return similar


def nearest(
    connection: sa.Connection,
    environments: Sequence[int],
    layers: Iterable[Config],
    index: LayerIndex,
    fields: Sequence[str],
) -> dict[Config, Any]:
    """Return for each layer the fastest result of the most similar config that has one, with these
    fields; layers without any are left out."""
    index.refresh(connection)
    chosen: dict[Config, int] = {}
    left = list(layers)
    for most, layers_at_most in _NEAREST:
        if not 0 < len(left) <= layers_at_most:
            continue
        close = index.nearest(left, most)
        known = _with_results(connection, environments, set().union(*close.values()))
        for layer, ids in close.items():
            if usable := [number for number in ids if number in known]:
                chosen[layer] = usable[0]
        left = [layer for layer in close if layer not in chosen]
    if left:
        close = index.nearest(left, 1, _with_results(connection, environments))
        chosen |= {layer: ids[0] for layer, ids in close.items()}
    rows = fastest(connection, environments, "config_id", chosen.values(), fields)
    return {layer: rows[number] for layer, number in chosen.items() if number in rows}


def read_configs(connection: sa.Connection, ids: Sequence[int]) -> Iterator[tuple[int, Config]]:
    """Yield configs by id; those of a kind that is not installed are left out."""
    for part in parts(ids):
        query = sa.select(config.c.id, config.c.json).where(config.c.id.in_(part))
        for number, text in connection.execute(query.order_by(config.c.id)):
            yield number, from_json_text(text)
