"""Coverage: the part of a model, a network or a tag that has results on an architecture, by
weight."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import sqlalchemy as sa

from tuna.configs import Config
from tuna.db import networks
from tuna.errors import BadInput, NotFound
from tuna.results.best import (
    Cover,
    LayerIndex,
    Scope,
    fastest,
    find_environments,
    nearest,
    read_configs,
)
from tuna.results.core_tables import config_tag, environment


@dataclass(frozen=True)
class CoveredLayer:
    """One layer or task, and its fastest result."""

    layer: str
    config_key: str
    weight: int  #: number of times that the model or network has it; 1 for a tag
    flops: int  #: number of operations of one layer
    cover: Cover
    solver: str = ""
    time_ms: float | None = None
    noisy: bool = False
    near: str = ""  #: most similar layer with a result; empty: this one has one, or none is similar


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
    scope: Scope,
    index: LayerIndex | None = None,
    most_layers: int | None = None,
) -> Coverage:
    """Return the coverage of the model, network or tag `name` by results on an architecture;
    `index`: that of an earlier question, which need not be read again.

    Without an architecture it is the only one that was tuned for. Results are timed ones of
    sessions, imports and golden versions, simulated ones left out. Raises NotFound for a name that
    is neither, and for a scope without any session; BadInput for several architectures without a
    choice, and for more than `most_layers` layers.
    """
    subject, weights = _weights(connection, name)
    if most_layers is not None and len(weights) > most_layers:
        raise BadInput(
            f"The {subject} has {len(weights)} layers, too many for one answer.",
            hint=f"type `tuna coverage {name} --arch {scope.arch} --json`",
        )
    scope = dataclasses.replace(scope, arch=scope.arch or _only_arch(connection, scope))
    environments = find_environments(connection, scope)
    layers = dict(read_configs(connection, list(weights)))
    index = index or LayerIndex()
    exact = fastest(connection, environments, "config_id", list(weights), ["noisy"])
    lacking = [layer for number, layer in layers.items() if number not in exact]
    near = nearest(connection, environments, lacking, index, ["layer"]) if lacking else {}
    rows = [
        covered(layer, weights[number], exact.get(number), near.get(layer))
        for number, layer in layers.items()
    ]
    order = list(reversed(Cover))
    rows.sort(key=lambda row: (order.index(row.cover), -row.weight, row.layer, row.config_key))
    return Coverage(subject, str(scope.arch), tuple(rows))


def _only_arch(connection: sa.Connection, scope: Scope) -> str:
    there = find_environments(connection, scope)
    query = sa.select(environment.c.arch).distinct().where(environment.c.id.in_(there))
    architectures = sorted(connection.execute(query).scalars())
    if len(architectures) > 1:
        raise BadInput(
            "Sessions were tuned for several architectures.",
            hint=f"name one with --arch: {', '.join(architectures)}",
        )
    return str(architectures[0])


def covered(layer: Config, weight: int, best: Any, near: Any = None) -> CoveredLayer:
    """Return a layer with the row of its fastest result, or of that of the most similar one."""
    about = layer.label, layer.key, weight, layer.flops
    if best is not None:
        return CoveredLayer(*about, Cover.EXACT, best.solver, best.time_ms, bool(best.noisy))
    if near is None:
        return CoveredLayer(*about, Cover.NONE)
    return CoveredLayer(*about, Cover.NEAR, near=near.layer)


def _weights(connection: sa.Connection, name: str) -> tuple[str, dict[int, int]]:
    try:
        model_id, model = networks.find(connection, name)
    except NotFound as error:
        query = sa.select(config_tag.c.config_id).where(config_tag.c.tag == name)
        tagged = dict.fromkeys(connection.execute(query).scalars(), 1)
        if not tagged:
            raise NotFound(f"Unknown model or tag {name!r}.", hint=error.hint) from None
        return f"tag {name}", tagged
    return f"model {model.name} {model.version[:12]}", networks.weights(connection, model_id)
