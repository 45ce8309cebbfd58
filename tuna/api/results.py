"""Questions to the database: results that meet a filter, and how much of a model they cover."""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from tuna.models.coverage import Coverage
    from tuna.reports.result_rows import ResultFilter, ResultRows


def query(wanted: ResultFilter) -> ResultRows:
    """Results of sessions, golden versions and imported databases that meet the filter, `limit` of them at most.

    They come by layer in the order of its import, then by time, solver and session. With `n_best` they are trials. Raises
    NotFound for a name that there is not, BadInput for a value that cannot be.
    """
    from tuna.db.database import open_database
    from tuna.db.engine import reading
    from tuna.reports.result_query import query as read

    with reading(open_database()) as connection:
        return read(connection, wanted)


def coverage(name: str, arch: str, *, device: str | None = None, library: str | None = None) -> Coverage:
    """How much of a model, network or tag has results on `arch`, by weight; see `models.coverage`. Raises NotFound."""
    from tuna.db.database import open_database
    from tuna.db.engine import reading
    from tuna.models.coverage import coverage as read

    with reading(open_database()) as connection:
        return read(connection, name, arch, device=device, library=library)
