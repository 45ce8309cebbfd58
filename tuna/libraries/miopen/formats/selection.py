"""Selects the results for MIOpen's databases: the options of its forms, and one result for each key
and solver."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator
from datetime import datetime
from operator import itemgetter
from typing import Any

from pydantic import Field

from tuna.libraries.exporter import FileOptions
from tuna.libraries.results import ResultSource

Age = tuple[float, int]
#: Where the age does not matter.
NO_AGE: Age = (0.0, 0)


class MiopenExportOptions(FileOptions):
    """The options that all of MIOpen's databases take."""

    top: int = Field(
        4,
        ge=1,
        description="solvers kept for a key of a find db; the others keep all that belong in them",
    )


def age_of(measured_at: datetime | None, num_cu: int) -> Age:
    """Smaller for what was measured later, then for fewer CUs."""
    return float("inf") if measured_at is None else -measured_at.timestamp(), num_cu


def one_each(
    entries: list[tuple[Any, ...]], mixed: bool, skipped: Counter[str]
) -> list[tuple[Any, ...]]:
    """The entries (time, solver, ..., age) of one key, fastest first, each solver once; the others
    are counted."""
    entries.sort()
    if len({entry[1] for entry in entries}) == len(entries):
        return entries
    best: dict[str, tuple[Any, ...]] = {}
    for entry in sorted(entries, key=itemgetter(-1)) if mixed else entries:
        best.setdefault(entry[1], entry)
    reason = "a later result" if mixed else "another config with the same key has a better time"
    skipped[reason] += len(entries) - len(best)
    return sorted(best.values())


def without_key(source: ResultSource) -> Iterator[tuple[str, int]]:
    """Counts of results that a database of MIOpen's cannot hold, by reason."""
    for kind, count in source.kinds_without_key().items():
        yield f"MIOpen has no key for a {kind} config", count
