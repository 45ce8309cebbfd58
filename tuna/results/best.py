"""The fastest known result of each of some layers, else that of the most similar layer."""

from __future__ import annotations

import contextlib
import enum
import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import sqlalchemy as sa

from tuna.configs import Config, from_json_text, read_line
from tuna.configs.similarity import family, log_sizes
from tuna.db.bulk import parts
from tuna.errors import BadInput, NotFound
from tuna.results.core_tables import config, environment
from tuna.results.selectable import BOTH, Results

#: Layers that are asked for at once.
MOST_LAYERS = 1000
#: Configs that are read at once, and similar ones that are looked at first.
_BATCH, _FIRST = 5000, 32
_KEY = re.compile("[0-9a-f]{64}", re.ASCII)
#: Of a result, under the names that rows of `tuna query` have.
_FIELDS = (
    *("layer", "config_key", "kind", "driver", "library", "solver", "params", "time_ms"),
    *("low_ms", "high_ms", "noisy", "arch", "environment", "library_version", "session_id"),
    *("golden", "kept_at"),
)


class Cover(str, enum.Enum):
    """A layer's class, by the results that there are."""

    EXACT = "exact"  #: it was measured on such a device
    NEAR = "near"  #: a layer that differs in sizes alone was
    NONE = "none"  #: neither

    __str__ = str.__str__


@dataclass(frozen=True)
class Scope:
    """Environments that are asked about; None: any."""

    arch: str | None = None
    device: str | None = None  #: text in the device's name
    library: str | None = None


@dataclass(frozen=True)
class BestResult:
    """A layer that was asked for, with the fastest result of it or of the most similar layer."""

    asked: str  #: as it was asked for
    cover: Cover
    result: Mapping[str, Any] | None  #: fields as `tuna query` has them


def best(
    connection: sa.Connection, asked: Sequence[str], scope: Scope, index: LayerIndex
) -> list[BestResult]:
    """Return an answer for each layer, which is a whole config key, a driver command or JSON.

    Results are timed ones of sessions, imports and golden versions, simulated ones left out. Raises
    BadInput for a text that names no layer, or several; NotFound for a scope without a session.
    """
    if not 1 <= len(asked) <= MOST_LAYERS:
        raise BadInput(f"1 to {MOST_LAYERS} layers can be asked for, not {len(asked)}.")
    named = {text: text if _KEY.fullmatch(text) else _layer(text) for text in asked}
    keys = {text: one if isinstance(one, str) else one.key for text, one in named.items()}
    environments = find_environments(connection, scope)
    ids = _ids(connection, keys.values())
    exact = fastest(connection, environments, list(ids.values()), _FIELDS)
    found = {key: exact.get(number) for key, number in ids.items()}
    answers: dict[str, BestResult] = {}
    for text, one in named.items():
        row, cover = found.get(keys[text]), Cover.EXACT
        if row is None and isinstance(one, Config):
            index.refresh(connection)
            row, cover = nearest(connection, environments, one, index), Cover.NEAR
        answers[text] = BestResult(text, Cover.NONE if row is None else cover, _document(row))
    return [answers[text] for text in asked]


def _layer(text: str) -> Config:
    layers = read_line(text)
    if len(layers) != 1:
        raise BadInput(
            f"{text[:200]!r} names {len(layers)} layers.", hint="ask for one: -F 1 of a convolution"
        )
    return layers[0]


def _document(row: Any) -> dict[str, Any] | None:
    if row is None:
        return None
    document = {name: getattr(row, name) for name in _FIELDS if name != "kept_at"}
    document["noisy"] = bool(row.noisy)
    return document | {"measured_at": row.kept_at.isoformat() if row.kept_at else None}


def _ids(connection: sa.Connection, keys: Iterable[str]) -> dict[str, int]:
    found: dict[str, int] = {}
    for part in parts(sorted(set(keys))):
        query = sa.select(config.c.key, config.c.id).where(config.c.key.in_(part))
        found |= {row.key: row.id for row in connection.execute(query)}
    return found


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


def _measured(environments: Sequence[int]) -> Iterator[Results]:
    for results in BOTH:
        here = results["environment_id"].in_(environments)
        yield results.only(here, *results.measured, by=["environment_id"])


def fastest(
    connection: sa.Connection,
    environments: Sequence[int],
    ids: Sequence[int],
    fields: Sequence[str],
) -> dict[int, Any]:
    """Return the fastest result of each config, with `config_id`, `time_ms` and `solver` among its
    fields."""
    found: dict[int, Any] = {}
    columns = list(dict.fromkeys(("config_id", "time_ms", "solver", *fields)))
    for part in parts(ids):
        for results in _measured(environments):
            query = results.select(*columns)
            for row in connection.execute(query.where(results["config_id"].in_(part))):
                before = found.get(row.config_id)
                if before is None or (row.time_ms, row.solver) < (before.time_ms, before.solver):
                    found[row.config_id] = row
    return found


class LayerIndex:
    """The configs of a database by similarity. Configs never change, so only new ones are read."""

    def __init__(self) -> None:
        self._last_id = 0
        self._families: dict[tuple[object, ...], _Family] = {}

    def refresh(self, connection: sa.Connection) -> None:
        """Read the configs that came since."""
        while True:
            query = sa.select(config.c.id, config.c.json).where(config.c.id > self._last_id)
            rows = connection.execute(query.order_by(config.c.id).limit(_BATCH)).all()
            for number, text in rows:
                self._last_id = number
                with contextlib.suppress(BadInput):  # of a kind that is not installed
                    self._add(number, from_json_text(text))
            if len(rows) < _BATCH:
                return

    def _add(self, number: int, layer: Config) -> None:
        like = family(layer)
        if like is not None:
            found = self._families.setdefault(like, _Family())
            found.ids.append(number)
            found.labels.append(layer.label)
            found.sizes.append(log_sizes(layer))

    def nearest(self, layer: Config) -> Iterator[list[int]]:
        """Yield ids of similar configs, the nearest first, in lists that grow; the layer's own is
        not among them."""
        like = family(layer)
        found = self._families.get(like) if like is not None else None
        if found is None:
            return
        ratios = np.abs(np.array(found.sizes) - np.array(log_sizes(layer)))
        distances = ratios.sum(axis=1).round(9)  # equal ones are ordered by label
        order = sorted(
            np.flatnonzero(distances > 0).tolist(),
            key=lambda place: (distances[place], found.labels[place]),
        )
        number = _FIRST
        while order:
            part, order = order[:number], order[number:]
            yield [found.ids[place] for place in part]
            number *= 8


@dataclass
class _Family:
    ids: list[int] = field(default_factory=list)
    labels: list[str] = field(default_factory=list)
    sizes: list[tuple[float, ...]] = field(default_factory=list)


def nearest(
    connection: sa.Connection, environments: Sequence[int], layer: Config, index: LayerIndex
) -> Any:
    """Return the fastest result of the most similar config that has one; None without any."""
    for ids in index.nearest(layer):
        found = fastest(connection, environments, ids, _FIELDS)
        if found:
            return next(found[number] for number in ids if number in found)
    return None


def read_configs(connection: sa.Connection, ids: Sequence[int]) -> Iterator[tuple[int, Config]]:
    """Yield configs by id; those of a kind that is not installed are left out."""
    for part in parts(ids):
        query = sa.select(config.c.id, config.c.json).where(config.c.id.in_(part))
        for number, text in connection.execute(query.order_by(config.c.id)):
            yield number, from_json_text(text)
