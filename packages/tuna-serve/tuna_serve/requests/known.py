"""Exact results of layers in one environment, and the documents that say what they are."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import sqlalchemy as sa

from tuna.api.rows import BOTH, Coverage, config, covered, parts, result_document, timed
from tuna.configs import Config
from tuna.libraries import registry
from tuna.libraries.base import Environment
from tuna.vocabulary import BASELINE

#: Of a result, as `tuna query` names them.
_FIELDS = (
    *("layer", "config_key", "kind", "driver", "solver", "params", "time_ms", "low_ms", "high_ms"),
    *("noisy", "simulated", "library_version", "session_id", "golden", "kept_at"),
)


@dataclass(frozen=True)
class ExactResult:
    """The fastest result of a layer in the environment."""

    row: Any

    def meets(self, target_ms: float | None) -> bool:
        """Whether it is as fast as was asked for."""
        return target_ms is None or bool(self.row.time_ms <= target_ms)

    def as_json(self) -> dict[str, Any]:
        """Return it as `tuna query --json` shows a row."""
        return result_document(self.row, _FIELDS)


def is_simulated(environment: Environment) -> bool:
    """Whether all results of an environment are: of a library that measures nothing, or of an
    emulated board. There they count."""
    return "emulator" in environment.flags or registry.is_simulated(environment.library)


def exact(
    connection: sa.Connection, environment: Environment, ids: Sequence[int]
) -> dict[int, ExactResult]:
    """Return the fastest result of each config in an environment, of sessions and golden versions;
    baselines, and what was simulated for a real device, left out."""
    fastest: dict[int, Any] = {}
    columns = ("config_id", *_FIELDS)
    for part in parts(ids):
        for results in BOTH:
            where = [
                results["environment"] == environment.key,
                results["family"] != BASELINE,
                timed(results["time_ms"]),
            ]
            if not is_simulated(environment):
                where.append(results["simulated"].is_(False))
            here = results.only(*where, by=("environment", "family", "simulated"))
            mine = here.only(results["config_id"].in_(part))
            for row in connection.execute(mine.fastest(["config_id"], *columns)):
                before = fastest.get(row.config_id)
                if before is None or (row.time_ms, row.solver) < (before.time_ms, before.solver):
                    fastest[row.config_id] = row
    return {key: ExactResult(row) for key, row in fastest.items()}


def stored_ids(connection: sa.Connection, layers: Iterable[Config]) -> dict[str, int]:
    """Return the ids of those of these layers that the database has, by key."""
    found: dict[str, int] = {}
    for part in parts(sorted(layer.key for layer in layers)):
        query = sa.select(config.c.key, config.c.id).where(config.c.key.in_(part))
        found |= {row.key: row.id for row in connection.execute(query)}
    return found


def coverage_of(
    subject: str,
    arch: str,
    layers: Mapping[int, tuple[Config, int]],
    found: Mapping[int, ExactResult],
) -> Coverage:
    """Return the coverage of layers, each with its weight, by exact results."""
    rows = {config_id: result.row for config_id, result in found.items()}
    there = (covered(layer, weight, rows.get(key)) for key, (layer, weight) in layers.items())
    return Coverage(subject, arch, tuple(there))
