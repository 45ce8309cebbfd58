"""Questions to the database: results that meet a filter, and how much of a model they cover."""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from tuna.models.coverage import Coverage
    from tuna.results.rows import ResultFilter, ResultRow, ResultRows
    from tuna.results.untried import LayerWithoutSolver, TargetMet


def query(wanted: ResultFilter, *, with_commands: bool = True) -> ResultRows:
    """Results of sessions, golden versions and imported databases that meet the filter, `limit` of
    them at most.

    They come by layer in the order of its import, then by time, solver and session. With `n_best`
    they are trials. Without commands `ResultRow.command` is empty, and no library is loaded. Raises
    NotFound for a name that there is not, BadInput for a value that cannot be.
    """
    from tuna.db.database import open_database
    from tuna.db.engine import reading
    from tuna.results.query import query as read

    with reading(open_database()) as connection:
        return read(connection, wanted, with_commands=with_commands)


def winners(session_id: int, tag: str | None = None, *, with_commands: bool = True) -> ResultRows:
    """The fastest result of each layer of a session, in the order of the layers' import; a baseline
    where it is the only one.

    `with_commands` as for `query`. Raises NotFound.
    """
    from dataclasses import replace

    from tuna.results.rows import MAX_LIMIT, ResultFilter

    found = query(
        ResultFilter(session_id=session_id, tag=tag, limit=MAX_LIMIT), with_commands=with_commands
    )
    first: dict[str, ResultRow] = {}
    for row in found:
        if row.time_ms is not None and (
            row.config_key not in first or first[row.config_key].baseline > row.baseline
        ):
            first[row.config_key] = row
    return replace(found, rows=tuple(first.values()))


def targets_met(session_id: int, tag: str | None = None) -> tuple[TargetMet, ...]:
    """The layers of a session that needed no trial, since a known result was as fast as was asked
    for."""
    from tuna.db.database import open_database
    from tuna.db.engine import reading
    from tuna.results.untried import targets_met as read

    with reading(open_database()) as connection:
        return read(connection, session_id, tag)


def without_solver(session_id: int, tag: str | None = None) -> list[LayerWithoutSolver]:
    """The layers of a session that no solver of its library takes, with the reason, in the order of
    their import."""
    from tuna.db.database import open_database
    from tuna.db.engine import reading
    from tuna.results.untried import without_solver as read

    with reading(open_database()) as connection:
        return read(connection, session_id, tag)


def coverage(
    name: str, arch: str, *, device: str | None = None, library: str | None = None
) -> Coverage:
    """How much of a model, network or tag has results on `arch`, by weight; see `models.coverage`.
    Raises NotFound."""
    from tuna.db.database import open_database
    from tuna.db.engine import reading
    from tuna.models.coverage import coverage as read

    with reading(open_database()) as connection:
        return read(connection, name, arch, device=device, library=library)
