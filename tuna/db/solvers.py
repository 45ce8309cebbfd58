"""Solvers and their applicability in SQL."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

import sqlalchemy as sa

from tuna.common.messages import choices
from tuna.db import sessions
from tuna.db.bulk import upsert
from tuna.db.engine import reading, transaction
from tuna.db.models import NoSolver, SolverApplicability, SolverRow
from tuna.errors import BadInput, NotFound
from tuna.libraries.abilities import unsupported_feature
from tuna.vocabulary import canonical_name, kind_text

if TYPE_CHECKING:
    from tuna.libraries.base import Library

_BATCH = 5000
#: Length of the column `no_solver.reason`
_REASON_CHARS = 255


def update_solvers(connection: sa.Connection, library: Library) -> int:
    """Store the library's solvers; mark those that it no longer has as invalid. Returns the number
    of solvers."""
    solvers = list(library.solvers())
    rows = [
        {
            "library": library.name,
            "name": canonical_name(solver.name),
            "kinds": ",".join(solver.kinds),
            "algorithm": solver.algorithm,
            "tunable": solver.tunable,
            "dynamic": solver.dynamic,
            "number": solver.number,
            "valid": True,
        }
        for solver in solvers
    ]
    upsert(connection, SolverRow, rows, key=("library", "name"), replace=True)
    connection.execute(
        sa.update(SolverRow)
        .where(
            SolverRow.library == library.name,
            SolverRow.name.not_in([canonical_name(solver.name) for solver in solvers]),
        )
        .values(valid=False)
    )
    return len(solvers)


@dataclass(frozen=True)
class StoredSolver:
    """A valid solver of a library, as stored."""

    id: int
    name: str
    kinds: tuple[str, ...]
    tunable: bool
    dynamic: bool
    number: int | None  #: library's own id of the solver; None: it has none


def list_solvers(connection: sa.Connection, library: str) -> list[StoredSolver]:
    """The library's valid solvers, ordered by the library's own ids, then by name; raises BadInput
    if there are none."""
    row = SolverRow
    statement = (
        sa.select(row.id, row.name, row.kinds, row.tunable, row.dynamic, row.number)
        .where(row.library == library, row.valid.is_(True))
        .order_by(row.number, row.name)
    )
    found = [
        StoredSolver(r.id, r.name, tuple(r.kinds.split(",")), r.tunable, r.dynamic, r.number)
        for r in connection.execute(statement)
    ]
    if not found:
        raise BadInput(
            f"The solvers of {library} are not known yet.",
            hint=f"run: `tuna update-solvers {library}`",
        )
    return found


def solver_ids(
    connection: sa.Connection, library: str, names: Sequence[str] = ()
) -> dict[str, int]:
    """Ids of the library's valid solvers by name, or only of `names` (which may be the library's
    own ids).

    Raises NotFound for an unknown one.
    """
    solvers = list_solvers(connection, library)
    known = {solver.name: solver.id for solver in solvers}
    by_number = {str(solver.number): solver.name for solver in solvers if solver.number is not None}
    if not names:
        return known
    chosen: dict[str, int] = {}
    for text in names:
        name = by_number.get(text, canonical_name(text))
        if name not in known:
            raise NotFound(
                f"{library} has no solver {text!r}.", hint=choices(text, known, "solvers")
            )
        chosen[name] = known[name]
    return chosen


@dataclass(frozen=True)
class Applicability:
    """Summary of an applicability update."""

    configs: int
    pairs: int
    #: number of answers by name of a solver that is not in the database
    unknown: Mapping[str, int] = field(default_factory=dict)
    #: labels of configs for which the library failed to answer; their solvers stay
    unanswered: tuple[str, ...] = ()
    #: number of configs that no solver takes, by reason
    without: Mapping[str, int] = field(default_factory=dict)


def update_applicability(
    engine: sa.Engine, library: Library, session_id: int, tag: str | None = None
) -> Applicability:
    """Ask the library which solvers can run which configs; computed outside of transactions, stored
    in batches.

    With a tag, its configs of kinds that the library does not have are stored as configs without a
    solver.
    """
    from tuna.db import configs

    with reading(engine) as connection:
        environment = sessions.get(connection, session_id).environment
        ids = solver_ids(connection, library.name)
        pairs = configs.with_ids(connection, library.kinds, tag)
        others = {} if tag is None else configs.kinds_beside(connection, library.kinds, tag)
    if not pairs and not others:
        raise BadInput("There are no configs yet.", hint="import some: `tuna import FILE -t TAG`")
    by_key = {config.key: config_id for config_id, config in pairs}
    unknown: Counter[str] = Counter()
    rows: list[dict[str, int]] = []
    config_ids = sorted(others)
    without = {config_id: _no_solver(kind_text(kind)) for config_id, kind in others.items()}
    reasons = Counter(without.values())
    unanswered: list[str] = []
    count = 0
    for config, names in library.applicable((config for _, config in pairs), environment):
        if names is None:
            unanswered.append(config.label)
            continue
        config_id = by_key[config.key]
        config_ids.append(config_id)
        applicable = {canonical_name(name) for name in names}
        unknown.update(applicable - ids.keys())
        if not applicable and (lacking := unsupported_feature(library, config)):
            without[config_id] = _no_solver(lacking)
            reasons[without[config_id]] += 1
        rows += [
            {"session_id": session_id, "config_id": config_id, "solver_id": solver_id}
            for solver_id in sorted(ids[name] for name in applicable & ids.keys())
        ]
        if len(config_ids) >= _BATCH:
            count += _replace(engine, session_id, config_ids, rows, without)
            rows, config_ids, without = [], [], {}
    count += _replace(engine, session_id, config_ids, rows, without)
    return Applicability(
        len(pairs) + len(others), count, dict(unknown), tuple(unanswered), dict(reasons)
    )


def _no_solver(what: str) -> str:
    return f"no solver for {what}"[:_REASON_CHARS]


def _replace(
    engine: sa.Engine,
    session_id: int,
    config_ids: Sequence[int],
    rows: Sequence[dict[str, int]],
    without: Mapping[int, str],
) -> int:
    of_configs = (NoSolver.session_id == session_id, NoSolver.config_id.in_(config_ids))
    lacking = [
        {"session_id": session_id, "config_id": key, "reason": text, "loaded": False}
        for key, text in without.items()
    ]

    def write(connection: sa.Connection) -> None:
        connection.execute(
            sa.delete(SolverApplicability).where(
                SolverApplicability.session_id == session_id,
                SolverApplicability.config_id.in_(config_ids),
            )
        )
        if rows:
            connection.execute(sa.insert(SolverApplicability), list(rows))
        connection.execute(
            sa.delete(NoSolver).where(*of_configs, NoSolver.config_id.not_in(list(without)))
        )
        upsert(connection, NoSolver, lacking, key=("session_id", "config_id"), update=("reason",))

    transaction(engine, write)
    return len(rows)
