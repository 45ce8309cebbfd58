"""Solvers and where they apply, in SQL."""

from __future__ import annotations

from collections.abc import Sequence

import sqlalchemy as sa

from tuna.db import configs, models
from tuna.db.models import SolverApplicability
from tuna.db.upsert import upsert
from tuna.errors import BadInput, NotFound
from tuna.libraries.base import Library

_BATCH = 5000


def update_solvers(connection: sa.Connection, library: Library) -> int:
    """Store the library's solvers; those it no longer has become invalid. Returns how many it has."""
    found = list(library.solvers())
    rows = [
        {
            "library": library.name,
            "name": solver.name,
            "kinds": ",".join(solver.kinds),
            "algorithm": solver.algorithm,
            "tunable": solver.tunable,
            "dynamic": solver.dynamic,
            "valid": True,
        }
        for solver in found
    ]
    upsert(
        connection,
        models.Solver,
        rows,
        key=("library", "name"),
        update=("kinds", "algorithm", "tunable", "dynamic", "valid"),
    )
    connection.execute(
        sa.update(models.Solver)
        .where(models.Solver.library == library.name, models.Solver.name.not_in([solver.name for solver in found]))
        .values(valid=False)
    )
    return len(found)


def solver_ids(connection: sa.Connection, library: str, names: Sequence[str] = ()) -> dict[str, int]:
    """Ids of the library's valid solvers, or of `names`; raises NotFound for a name that is none of them."""
    statement = sa.select(models.Solver.name, models.Solver.id).where(
        models.Solver.library == library, models.Solver.valid.is_(True)
    )
    known = {row.name: row.id for row in connection.execute(statement)}
    if not known:
        raise BadInput(
            f"The solvers of {library} are not known yet.", hint=f"run: ./go_fish.py {library} --update_solvers"
        )
    for name in names:
        if name not in known:
            raise NotFound(f"{library} has no solver {name!r}.", hint=f"solvers: {', '.join(sorted(known))}")
    return {name: known[name] for name in names} if names else known


def update_applicability(
    connection: sa.Connection, library: Library, session_id: int, tag: str | None = None
) -> tuple[int, int]:
    """Work out which solvers can run which configs; returns the numbers of configs and of applicable pairs."""
    ids = solver_ids(connection, library.name)
    pairs = configs.with_ids(connection, library.kinds, tag)
    if not pairs:
        raise BadInput(
            "There are no configs yet.", hint="import some: ./go_fish.py LIBRARY import_configs -t TAG -f FILE"
        )
    by_key = {config.key: config_id for config_id, config in pairs}
    rows: list[dict[str, int]] = []
    config_ids: list[int] = []
    count = 0
    for config, names in library.applicable(config for _, config in pairs):
        config_id = by_key[config.key]
        config_ids.append(config_id)
        rows += [{"session_id": session_id, "config_id": config_id, "solver_id": ids[name]} for name in names]
        if len(rows) >= _BATCH:
            count += _replace(connection, session_id, config_ids, rows)
            rows, config_ids = [], []
    return len(pairs), count + _replace(connection, session_id, config_ids, rows)


def _replace(
    connection: sa.Connection, session_id: int, config_ids: Sequence[int], rows: Sequence[dict[str, int]]
) -> int:
    connection.execute(
        sa.delete(SolverApplicability).where(
            SolverApplicability.session_id == session_id, SolverApplicability.config_id.in_(config_ids)
        )
    )
    if rows:
        connection.execute(sa.insert(SolverApplicability), list(rows))
    return len(rows)


def list_solvers(connection: sa.Connection, library: str) -> list[tuple[str, str, bool]]:
    """Name, config kinds and tunability of the library's valid solvers, by name."""
    statement = (
        sa.select(models.Solver.name, models.Solver.kinds, models.Solver.tunable)
        .where(models.Solver.library == library, models.Solver.valid.is_(True))
        .order_by(models.Solver.name)
    )
    return [(row.name, row.kinds, row.tunable) for row in connection.execute(statement)]
