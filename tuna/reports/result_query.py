"""Results of sessions, golden versions and imported databases that meet a filter, whatever their
number in the database.

Rows are read a few layers at a time, in the order of the layers' import, until there are as many as
are asked for. Which layers can have any is found out first, as far as an index tells that they are
few.
"""

from __future__ import annotations

import shlex
from collections import defaultdict
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any

import sqlalchemy as sa

from tuna.db.batches import parts
from tuna.db.models import (
    Config,
    Environment,
    FindDb,
    Golden,
    GoldenEntry,
    Job,
    Session,
    Solver,
    Trial,
)
from tuna.db.models import StepResult as Attempt
from tuna.db.searches import why_ended
from tuna.db.types import timed
from tuna.reports.result_filter import Conditions, conditions
from tuna.reports.result_rows import ResultFilter, ResultRow, ResultRows
from tuna.vocabulary import BASELINE

#: As many layers or fewer are named one by one; where a condition leaves more, the layers are gone
#: through in their order.
_FEW = 2_000
_MOST_LAYERS = 500
_FACTS: tuple[Any, ...] = (
    Config.id.label("config_id"),
    Config.label.label("layer"),
    Config.key.label("config_key"),
    Config.kind,
    Config.driver,
    Solver.name.label("solver"),
    Environment.library,
    Environment.arch,
    Environment.num_cu,
    Environment.key.label("environment"),
    Environment.library_version,
    Environment.toolchain,
    Environment.conditions,
    Environment.device.label("environment_device"),
    Session.id.label("session_id"),
    Session.reason,
    Solver.algorithm.label("family"),
)
#: Columns of both find_db and golden_entry.
_RESULT = ("time_ms", "params", "workspace_bytes", "noisy", "clock", "source")
#: Columns that only golden entries have.
_NO_SOURCE = tuple(sa.null().label(name) for name in ("golden", "entry_id", "worker", "device"))
_BEST = sa.and_(Trial.job_id == FindDb.job_id, Trial.number == FindDb.trial_number)
#: Fields of a row that are taken over as they are.
_COPIED = (
    *(
        "layer",
        "config_key",
        "kind",
        "driver",
        "library",
        "solver",
        "time_ms",
        "low_ms",
        "high_ms",
        "max_error",
    ),
    *("arch", "num_cu", "environment", "library_version", "toolchain", "session_id", "reason"),
    *("job_id", "trial_number", "golden"),
)


def query(
    connection: sa.Connection, wanted: ResultFilter, *, with_commands: bool = True
) -> ResultRows:
    """The rows that meet the filter; raises NotFound for a name that there is not, BadInput for a
    value that cannot be.

    Without commands `ResultRow.command` is empty; to make them loads the libraries.
    """
    meant = conditions(connection, wanted)
    found: list[Any] = []
    for layers in _layers(connection, meant):
        found += (
            _trials(connection, meant, layers)
            if wanted.n_best
            else _results(connection, meant, layers)
        )
        if len(found) > wanted.limit:
            break
    rows = _described(connection, found[: wanted.limit], with_commands=with_commands)
    return ResultRows(tuple(rows), wanted.limit, len(found) > wanted.limit)


def _layers(connection: sa.Connection, meant: Conditions) -> Iterator[list[int]]:
    """Ids of configs in their order, in lists that grow: a layer can have one row or thousands."""
    few = _few(connection, meant)
    number, last = 1, 0
    while True:
        if few is not None:
            part, few = few[:number], few[number:]
        else:
            after = (
                sa.select(Config.id)
                .where(Config.id > last, *meant.configs)
                .order_by(Config.id)
                .limit(number)
            )
            part = list(connection.execute(after).scalars())
        if not part:
            return
        yield part
        last, number = part[-1], min(2 * number, _MOST_LAYERS)


def _few(connection: sa.Connection, meant: Conditions) -> list[int] | None:
    """The configs that can have rows, if they are few."""
    of_configs: set[int] | None = None
    if meant.configs:
        query = sa.select(Config.id).where(*meant.configs).limit(_FEW + 1)
        of_configs = set(connection.execute(query).scalars())
        of_configs = None if len(of_configs) > _FEW else of_configs
    of_results: set[int] | None = set()
    for table in (FindDb, GoldenEntry):
        on_rows = meant.of(table)
        if not on_rows or of_results is None:
            of_results = None
            break
        query = sa.select(table.config_id).where(*on_rows).limit(_FEW + 1)
        ids = list(connection.execute(query).scalars())
        of_results = None if len(ids) > _FEW else of_results | set(ids)
    if of_configs is None or of_results is None:
        both = of_results if of_configs is None else of_configs
        return None if both is None else sorted(both)
    return sorted(of_configs & of_results)


def _from_layers(query: sa.Select[Any], table: Any) -> sa.Select[Any]:
    """Read `table` first, by the index on its config: MariaDB would begin with the smallest table
    and read all results."""
    for dialect in ("mysql", "mariadb"):
        query = query.prefix_with("STRAIGHT_JOIN", dialect=dialect)
    return query.select_from(table).with_hint(
        table, f"FORCE INDEX (ix_{table.__tablename__}_config_id)"
    )


def _joined(query: sa.Select[Any], table: Any, layers: Sequence[int]) -> sa.Select[Any]:
    return (
        _from_layers(query, table)
        .join(Config, Config.id == table.config_id)
        .join(Solver, Solver.id == table.solver_id)
        .join(Session, Session.id == table.session_id)
        .join(Environment, Environment.id == Session.environment_id)
        .where(table.config_id.in_(layers))
    )


def _session_results(layers: Sequence[int]) -> sa.Select[Any]:
    """Of find_db, imported ones too."""
    columns = (
        *_FACTS,
        *(getattr(FindDb, name) for name in _RESULT),
        *(
            FindDb.simulated,
            FindDb.job_id,
            FindDb.trial_number,
            Trial.low_ms,
            Trial.high_ms,
            Trial.max_error,
        ),
        FindDb.updated_at.label("at"),
        *_NO_SOURCE,
    )
    return _joined(sa.select(*columns), FindDb, layers).outerjoin(Trial, _BEST)


def _golden_results(layers: Sequence[int]) -> sa.Select[Any]:
    """Of golden versions; trials are those of the session's result, as long as that still has the
    same time."""
    same = (
        getattr(FindDb, name) == getattr(GoldenEntry, name)
        for name in ("session_id", "config_id", "solver_id")
    )
    columns = (
        *_FACTS,
        *(getattr(GoldenEntry, name) for name in _RESULT),
        sa.false().label("simulated"),
        *(FindDb.job_id, FindDb.trial_number, Trial.low_ms, Trial.high_ms, Trial.max_error),
        GoldenEntry.measured_at.label("at"),
        *(
            Golden.version.label("golden"),
            GoldenEntry.id.label("entry_id"),
            GoldenEntry.worker,
            GoldenEntry.device,
        ),
    )
    return (
        _joined(sa.select(*columns), GoldenEntry, layers)
        .join(Golden, Golden.id == GoldenEntry.golden_id)
        .outerjoin(FindDb, sa.and_(*same, FindDb.time_ms == GoldenEntry.time_ms))
        .outerjoin(Trial, _BEST)
    )


def _results(connection: sa.Connection, meant: Conditions, layers: Sequence[int]) -> list[Any]:
    """Results of these configs, one more than the limit of each source."""
    found: list[Any] = []
    for table, rows in ((FindDb, _session_results(layers)), (GoldenEntry, _golden_results(layers))):
        order = (
            table.config_id,
            table.time_ms.is_(None),
            table.time_ms,
            Solver.name,
            table.session_id,
            table.id,
        )
        found += connection.execute(
            rows.where(*meant.of(table)).order_by(*order).limit(meant.wanted.limit + 1)
        )
    return sorted(found, key=_place)


def _place(row: Any) -> tuple[Any, ...]:
    last = (row.solver, row.session_id, row.golden or 0)
    return (row.config_id, row.time_ms is None, row.time_ms or 0.0, *last)


def _trials(connection: sa.Connection, meant: Conditions, layers: Sequence[int]) -> list[Any]:
    """The fastest trials of each of these configs, solver and environment, with results that were
    imported.

    Equal times are ordered by params, so that the choice does not depend on the order in which they
    were stored.
    """
    n_best = meant.wanted.n_best
    fastest = (Trial.time_ms, Trial.params, Job.session_id, Trial.number)
    place = sa.func.row_number().over(
        partition_by=(Job.config_id, Job.solver_id, Session.environment_id), order_by=fastest
    )
    ranked = (
        _from_layers(sa.select(Trial.id.label("trial_id"), place.label("place")), Job)
        .join(Trial, Trial.job_id == Job.id)
        .join(Session, Session.id == Job.session_id)
        .where(
            Job.config_id.in_(layers),
            Trial.cause.is_(None),
            timed(Trial.time_ms),
            Trial.ended_early.is_(False),
        )
        .where(
            *meant.of_keys(Job.session_id, Job.solver_id),
            *meant.of_trials(Job.id, Trial.measured_at),
        )
        .subquery()
    )
    same = (
        getattr(FindDb, name) == getattr(Job, name)
        for name in ("session_id", "config_id", "solver_id")
    )
    measured = (
        _joined(
            sa.select(
                *_FACTS,
                *(
                    Trial.time_ms,
                    Trial.params,
                    Trial.clock,
                    Trial.low_ms,
                    Trial.high_ms,
                    Trial.max_error,
                ),
                *(FindDb.workspace_bytes, FindDb.noisy, FindDb.simulated),
                *(Trial.job_id, Trial.number.label("trial_number"), Trial.measured_at.label("at")),
                *_NO_SOURCE,
                sa.null().label("source"),
            ),
            Job,
            layers,
        )
        .join(Trial, Trial.job_id == Job.id)
        .join(ranked, ranked.c.trial_id == Trial.id)
        .outerjoin(FindDb, sa.and_(*same))
        .where(ranked.c.place <= n_best)
    )
    imported = _session_results(layers).where(
        *meant.of(FindDb),
        FindDb.job_id.is_(None),
        FindDb.time_ms > 0,
        sa.func.coalesce(FindDb.source, "") != "",
    )
    kept: dict[tuple[int, str, str, str], list[Any]] = defaultdict(list)
    rows = [*connection.execute(measured), *connection.execute(imported)]
    for row in sorted(
        rows, key=lambda row: (row.time_ms, row.params or "", row.session_id, row.trial_number or 0)
    ):
        of_key = kept[row.config_id, row.library, row.solver, row.environment]
        if len(of_key) < (n_best or 0):
            of_key.append(row)
    chosen = [row for of_key in kept.values() for row in of_key]
    return sorted(
        chosen,
        key=lambda row: (row.config_id, row.time_ms, row.solver, row.params or "", row.session_id),
    )


def _described(
    connection: sa.Connection, rows: Sequence[Any], *, with_commands: bool
) -> Iterator[ResultRow]:
    """The rows with who measured them, and how it is repeated."""
    jobs = {row.job_id for row in rows if row.job_id is not None}
    attempts, ended = _attempts(connection, jobs), why_ended(connection, jobs)
    commands = _commands(connection, rows, attempts) if with_commands else [""] * len(rows)
    for row, command in zip(rows, commands, strict=True):
        attempt = None if row.source else attempts.get(row.job_id)
        yield ResultRow(
            **{name: getattr(row, name) for name in _COPIED},
            baseline=row.family == BASELINE,
            params=row.params or "",
            noisy=bool(row.noisy),
            simulated=bool(row.simulated),
            clock=row.clock or "",
            workspace_bytes=row.workspace_bytes or 0,
            conditions=row.conditions or {},
            imported_from=row.source or None,
            search_ended=ended.get(row.job_id, "") if row.golden is None else "",
            worker=row.worker or (attempt.worker if attempt else ""),
            device=row.device or (attempt.device if attempt else "") or row.environment_device,
            measured_at=row.at,
            command=command,
        )


def _commands(
    connection: sa.Connection, rows: Sequence[Any], attempts: Mapping[int, Any]
) -> list[str]:
    """For each row what repeats its measurement, or shows more of it."""
    from tuna.queue.reproduction import Repeated, commands

    def repeated(row: Any) -> Repeated | None:
        if row.golden is not None or row.source or row.job_id not in attempts:
            return None
        return Repeated(row.job_id, attempts[row.job_id].step, row.trial_number)

    of_row = [repeated(row) for row in rows]
    found = commands(connection, [one for one in of_row if one is not None])
    return [
        (one and found.get(one)) or _other_command(row)
        for row, one in zip(rows, of_row, strict=True)
    ]


def _attempts(connection: sa.Connection, job_ids: Iterable[int]) -> dict[int, Any]:
    """The last good attempt of each job, one on a device before any other."""
    columns = (Attempt.job_id, Attempt.worker, Attempt.device, Attempt.step)
    found = {}
    for part in parts(sorted(job_ids)):
        query = sa.select(*columns).where(Attempt.job_id.in_(part), Attempt.ok.is_(True))
        for row in connection.execute(query.order_by(Attempt.device != "", Attempt.id)):
            found[row.job_id] = row
    return found


def _other_command(row: Any) -> str:
    """What shows more of a result that cannot be measured again here."""
    if row.golden is not None:
        words = [
            "tuna",
            "golden",
            "explain",
            str(row.golden),
            str(row.entry_id),
            "--library",
            row.library,
        ]
        return shlex.join(words)
    words = [
        "tuna",
        "query",
        "--session-id",
        str(row.session_id),
        "--solver",
        row.solver,
        "--layer",
        row.config_key,
    ]
    return shlex.join([*words, "--json"])
