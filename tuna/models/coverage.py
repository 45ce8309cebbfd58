"""Coverage: the part of a model, a network or a tag that has results on an architecture, by
weight."""

from __future__ import annotations

import dataclasses
import enum
from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import sqlalchemy as sa

from tuna.configs import Config, from_json_text
from tuna.configs.similarity import family, size_distance
from tuna.db import networks
from tuna.db.bulk import parts
from tuna.errors import NotFound
from tuna.results.core_tables import config, config_tag, environment
from tuna.results.selectable import BOTH, Results


class Cover(str, enum.Enum):
    """A layer's class, by the results that there are."""

    EXACT = "exact"  #: it was measured on such a device
    NEAR = "near"  #: a layer that differs in sizes alone was
    NONE = "none"  #: neither

    __str__ = str.__str__


@dataclass(frozen=True)
class CoveredLayer:
    """One layer or task, and its fastest result."""

    layer: str
    config_key: str
    weight: int  #: how often the model or network has it; 1 for a tag
    flops: int  #: operations of one
    cover: Cover
    solver: str = ""
    time_ms: float | None = None
    noisy: bool = False
    near: str = ""  #: the most similar layer with a result, where this one has none


@dataclass(frozen=True)
class Coverage:
    """The layers, those without a result first, then by weight."""

    subject: str
    arch: str
    layers: tuple[CoveredLayer, ...]

    @property
    def shares(self) -> Mapping[Cover, float]:
        """Shares of the weight."""
        return self._shares([layer.weight for layer in self.layers])

    @property
    def work_shares(self) -> Mapping[Cover, float]:
        """Shares of the floating-point operations, as far as they are counted."""
        return self._shares([layer.weight * layer.flops for layer in self.layers])

    def of(self, cover: Cover) -> tuple[CoveredLayer, ...]:
        """The layers of this class."""
        return tuple(layer for layer in self.layers if layer.cover is cover)

    def as_json(self) -> dict[str, Any]:
        """All of it, JSON-serialisable."""
        return {
            "subject": self.subject,
            "arch": self.arch,
            "layers_by_cover": {str(cover): len(self.of(cover)) for cover in Cover},
            "of_weight": {str(cover): share for cover, share in self.shares.items()},
            "of_flops": {str(cover): share for cover, share in self.work_shares.items()},
            "layers": [dataclasses.asdict(layer) for layer in self.layers],
        }

    def _shares(self, weights: Sequence[int]) -> dict[Cover, float]:
        total = sum(weights) or 1
        pairs = list(zip(self.layers, weights, strict=True))
        return {
            cover: sum(weight for layer, weight in pairs if layer.cover is cover) / total
            for cover in Cover
        }


def coverage(
    connection: sa.Connection,
    name: str,
    arch: str,
    *,
    device: str | None = None,
    library: str | None = None,
) -> Coverage:
    """Return the coverage of the model, network or tag `name` by results on `arch` (and `device`,
    text in its name).

    Results are timed ones of sessions, imports and golden versions, simulated ones left out. Raises
    NotFound for a name that is neither, and for an architecture without any session.
    """
    subject, weights = _weights(connection, name)
    environments = _environments(connection, arch, device, library)
    layers = dict(_read(connection, list(weights)))
    exact = _fastest(connection, environments, list(weights))
    missing = {number: layer for number, layer in layers.items() if number not in exact}
    near = _nearest(connection, environments, missing)
    found = [
        _covered(layer, weights[number], exact.get(number), near.get(number))
        for number, layer in layers.items()
    ]
    order = list(reversed(Cover))
    found.sort(key=lambda one: (order.index(one.cover), -one.weight, one.layer, one.config_key))
    return Coverage(subject, arch, tuple(found))


def _covered(layer: Config, weight: int, best: Any, near: str | None) -> CoveredLayer:
    about = layer.label, layer.key, weight, layer.flops
    if best is not None:
        return CoveredLayer(*about, Cover.EXACT, best.solver, best.time_ms, bool(best.noisy))
    return CoveredLayer(*about, Cover.NONE if near is None else Cover.NEAR, near=near or "")


def _weights(connection: sa.Connection, name: str) -> tuple[str, dict[int, int]]:
    try:
        model_id, model = networks.find(connection, name)
    except NotFound as error:
        query = sa.select(config_tag.c.config_id).where(config_tag.c.tag == name)
        tagged = dict.fromkeys(connection.execute(query).scalars(), 1)
        if not tagged:
            raise NotFound(
                f"There is neither a model nor a tag {name!r}.", hint=error.hint
            ) from None
        return f"tag {name}", tagged
    return f"model {model.name} {model.version[:12]}", networks.weights(connection, model_id)


def _environments(
    connection: sa.Connection, arch: str, device: str | None, library: str | None
) -> list[int]:
    query = sa.select(environment.c.id).where(environment.c.arch == arch)
    if device is not None:
        query = query.where(sa.func.instr(sa.func.lower(environment.c.device), device.lower()) > 0)
    if library is not None:
        query = query.where(environment.c.library == library)
    found = list(connection.execute(query).scalars())
    if not found:
        there = sorted(connection.execute(sa.select(environment.c.arch).distinct()).scalars())
        what = " ".join(filter(None, (arch, device, library)))
        raise NotFound(
            f"No session was tuned for {what}.",
            hint=f"architectures: {', '.join(there) or 'none yet'}",
        )
    return found


def _read(connection: sa.Connection, ids: Sequence[int]) -> Iterator[tuple[int, Config]]:
    """Configs by id; those of a kind that is not installed are left out."""
    for part in parts(ids):
        query = sa.select(config.c.id, config.c.json).where(config.c.id.in_(part))
        for number, text in connection.execute(query.order_by(config.c.id)):
            yield number, from_json_text(text)


def _measured(environments: Sequence[int]) -> Iterator[Results]:
    for results in BOTH:
        here = results["environment_id"].in_(environments)
        yield results.only(here, *results.measured, by=["environment_id"])


def _fastest(
    connection: sa.Connection, environments: Sequence[int], ids: Sequence[int]
) -> dict[int, Any]:
    """The fastest result of each config."""
    found: dict[int, Any] = {}
    for part in parts(ids):
        for results in _measured(environments):
            query = results.select("config_id", "time_ms", "solver", "noisy")
            for row in connection.execute(query.where(results["config_id"].in_(part))):
                before = found.get(row.config_id)
                if before is None or (row.time_ms, row.solver) < (before.time_ms, before.solver):
                    found[row.config_id] = row
    return found


def _nearest(
    connection: sa.Connection, environments: Sequence[int], missing: Mapping[int, Config]
) -> dict[int, str]:
    """The label of the most similar layer with a result, for each of those without one."""
    wanted: dict[tuple[object, ...], list[int]] = defaultdict(list)
    for number, layer in missing.items():
        if (like := family(layer)) is not None:
            wanted[like].append(number)
    if not wanted:
        return {}
    kinds = {layer.kind for layer in missing.values()}
    ids: set[int] = set()
    for results in _measured(environments):
        query = results.select("config_id", by=["kind"]).where(results["kind"].in_(kinds))
        ids |= set(connection.execute(query.distinct()).scalars())
    best: dict[int, tuple[float, str]] = {}
    for _, known in _read(connection, sorted(ids)):
        for number in wanted.get(family(known) or (), ()):
            distance = size_distance(missing[number], known)
            if distance is not None:
                best[number] = min(
                    best.get(number, (distance, known.label)), (distance, known.label)
                )
    return {number: label for number, (_, label) in best.items()}
