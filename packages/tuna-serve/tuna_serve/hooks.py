"""Answers to what the core asks the service for: artifacts that its rows name, figures."""

from __future__ import annotations

import sqlalchemy as sa

from tuna.api.rows import ArtifactUser
from tuna.reports.prometheus import Metric, Samples, SqlMetrics
from tuna_serve.db import cache_entries, requests

REQUESTS = ArtifactUser(requests.files)
CACHES = ArtifactUser(cache_entries.digests)


def _read(connection: sa.Connection, samples: Samples) -> None:
    for space in cache_entries.spaces(connection):
        samples.set("tuna_cache_files", space.files, space.space)
        samples.set("tuna_cache_bytes", space.size_bytes, space.space)
        samples.set("tuna_cache_refused_total", space.refused, space.space)


METRICS = SqlMetrics(
    {
        "tuna_cache_files": Metric("gauge", ("space",), "Files in a space of the cache."),
        "tuna_cache_bytes": Metric("gauge", ("space",), "Their bytes."),
        "tuna_cache_refused_total": Metric(
            "counter",
            ("space",),
            "Times that other bytes were put where a file is, of those there.",
        ),
    },
    _read,
)
