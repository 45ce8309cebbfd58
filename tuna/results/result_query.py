"""Results of sessions, golden versions and imported databases that meet a filter, whatever their
number in the database.

Rows are read a few layers at a time, in the order of the layers' import, until there are as many as
are asked for. Which layers can have any is found out first, as far as an index tells that they are
few.
"""

from __future__ import annotations

import base64
import contextlib
import heapq
import itertools
import json
import shlex
from collections import defaultdict
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import sqlalchemy as sa

from tuna.db.bulk import RowPage
from tuna.db.searches import why_ended
from tuna.errors import BadInput
from tuna.results.core_tables import config
from tuna.results.filter import Conditions, conditions
from tuna.results.result_rows import ResultFilter, ResultRow, ResultRows
from tuna.results.selectable import (
    BOTH,
    SESSIONS,
    TRIALS,
    GoodAttempt,
    Results,
    last_good_attempts,
)
from tuna.vocabulary import BASELINE

#: Maximum of layers that are named one by one; where a condition leaves more, all layers are read,
#: ordered
_FEW = 2_000
#: Maximum of sessions that are looked at one by one
_FEW_SESSIONS = 8
#: Number of layers that are read at once: at first, and at most
_FIRST, _MAX_LAYERS = 64, 500
#: Fields of a row that are taken over unchanged
_COPIED = (
    *("layer", "config_key", "kind", "driver", "library", "solver", "time_ms", "low_ms"),
    *("high_ms", "max_error", "arch", "num_cu", "environment", "library_version", "toolchain"),
    *("session_id", "reason", "job_id", "trial_number", "golden"),
)
#: Other columns of any provenance
_READ = (
    *("config_id", "conditions", "environment_device", "family", "params", "workspace_bytes"),
    *("noisy", "simulated", "clock", "source", "kept_at"),
)
#: Columns that only golden entries have
_OF_ENTRY = ("id", "worker", "device")


def query(
    connection: sa.Connection,
    wanted: ResultFilter,
    *,
    with_commands: bool = True,
    cursor: str = "",
) -> ResultRows:
    """The rows that meet the filter; raises NotFound for an unknown name, BadInput for a
    value that cannot be.

    Without commands `ResultRow.command` is empty; to make them loads the libraries. `cursor`: that
    of the rows before, which the same filter gave; results that come meanwhile move none.
    """
    meant = conditions(connection, wanted)
    place = _place_of_trial if wanted.n_best else _place
    after = _Cursor.parse(cursor, place) if cursor else None
    page: list[Any] = []
    for layers in _layers(connection, meant, after.layer if after else 0):
        before = after.given if after and layers[0] == after.layer else 0
        rows = (
            _trials(connection, meant, layers)
            if wanted.n_best
            else _results(connection, meant, layers, wanted.limit + before)
        )
        page += [row for row in rows if after is None or place(row) > after.place]
        if len(page) > wanted.limit:
            break
    more, page = len(page) > wanted.limit, page[: wanted.limit]
    described = _described(connection, page, with_commands=with_commands)
    following = _Cursor.behind(page, place, after).text() if more else ""
    return ResultRows(tuple(described), wanted.limit, more, following)


def winners(
    connection: sa.Connection,
    wanted: ResultFilter,
    *,
    with_commands: bool = True,
    after: int = 0,
) -> RowPage[ResultRow]:
    """The fastest result of each layer, a baseline where it is the only one, for `limit` layers
    behind the config `after`; conditions, commands and errors are those of `query`."""
    meant = conditions(connection, wanted)
    best: dict[int, Any] = {}
    for layers in _layers(connection, meant, after + 1, wanted.limit + 1):
        for row in sorted(_fastest(connection, meant, layers), key=_place):
            before = best.setdefault(row.config_id, row)
            if before.family == BASELINE != row.family:
                best[row.config_id] = row
        if len(best) > wanted.limit:
            break
    rows = list(best.values())
    more, rows = len(rows) > wanted.limit, rows[: wanted.limit]
    described = tuple(_described(connection, rows, with_commands=with_commands))
    return RowPage(described, rows[-1].config_id if more else None)


@dataclass(frozen=True)
class _Cursor:
    """A place among the rows: the last one that was given."""

    place: tuple[Any, ...]
    given: int  #: number of rows of its layer, up to this one

    @property
    def layer(self) -> int:
        """Id of the config of the row."""
        return int(self.place[0])

    @classmethod
    def behind(
        cls, rows: Sequence[Any], place: Callable[[Any], tuple[Any, ...]], before: _Cursor | None
    ) -> _Cursor:
        """Return the cursor behind these rows, which began behind `before`."""
        last = place(rows[-1])
        given = sum(row.config_id == last[0] for row in rows)
        return cls(last, given + (before.given if before and before.layer == last[0] else 0))

    @classmethod
    def parse(cls, text: str, place: Callable[[Any], tuple[Any, ...]]) -> _Cursor:
        """Return what `text` made; raises BadInput for anything else, or of the other kind of
        rows."""
        kinds = _KINDS_OF_TRIAL if place is _place_of_trial else _KINDS
        with contextlib.suppress(ValueError, TypeError, RecursionError):
            values, given = json.loads(base64.urlsafe_b64decode(text.encode() + b"=="))
            fits = [type(one) in kind for one, kind in zip(values, kinds, strict=True)]
            if all(fits) and type(given) is int and 0 <= given <= 1 << 40:
                return cls(tuple(values), given)
        raise BadInput("The cursor is not one of these rows.", hint="begin without a cursor")

    def text(self) -> str:
        """Return the cursor as one word."""
        document = json.dumps([self.place, self.given], separators=(",", ":"))
        return base64.urlsafe_b64encode(document.encode()).decode().rstrip("=")


def _layers(
    connection: sa.Connection, meant: Conditions, first: int, number: int = 1
) -> Iterator[list[int]]:
    """Ids of configs from `first` on in their order, `number` of them and then lists that grow: a
    layer can have one row or thousands."""
    few = _few(connection, meant)
    if few is not None:
        ids = iter([one for one in few if one >= first])
    elif meant.sessions is not None and len(meant.sessions) <= _FEW_SESSIONS:
        ids = _of_sessions(connection, meant, first)
    else:
        ids = _in_chunks(
            connection, sa.select(config.c.id).where(*meant.configs), config.c.id, first
        )
    while part := list(itertools.islice(ids, min(number, _MAX_LAYERS))):
        yield part
        number *= 2


def _of_sessions(connection: sa.Connection, meant: Conditions, first: int) -> Iterator[int]:
    """Configs with results of these sessions, each by an index on session and config."""
    found = []
    for results in BOTH:
        for session_id in meant.sessions or ():
            column = results["config_id"]
            query = results.select("config_id").join(config, config.c.id == column)
            query = query.where(results["session_id"] == session_id, *meant.of(results))
            # MariaDB would collect all for DISTINCT; groups come in the order of the index
            query = query.where(*meant.configs).group_by(column)
            found.append(_in_chunks(connection, query, column, first))
    return (number for number, _ in itertools.groupby(heapq.merge(*found)))


def _in_chunks(
    connection: sa.Connection, query: sa.Select[Any], column: Any, first: int
) -> Iterator[int]:
    """Values of a query of this column from `first` on in their order, read when they are
    needed."""
    number, last = _FIRST, first - 1
    while True:
        chunk = query.where(column > last).order_by(column).limit(number)
        found = connection.execute(chunk).scalars().all()
        yield from found
        if len(found) < number:
            return
        last, number = found[-1], min(8 * number, _MAX_LAYERS)


def _few(connection: sa.Connection, meant: Conditions) -> list[int] | None:
    """The configs that can have rows, if they are few."""

    def ids(query: sa.Select[Any], *where: sa.ColumnElement[bool]) -> set[int] | None:
        if not where:
            return None
        found = connection.execute(query.where(*where).limit(_FEW + 1)).scalars().all()
        return set(found) if len(found) <= _FEW else None

    of_configs = ids(sa.select(config.c.id), *meant.configs)
    of_results = set[int]()
    for results in BOTH:
        found = ids(results.select("config_id"), *meant.of(results))
        if found is None:
            return None if of_configs is None else sorted(of_configs)
        of_results |= found
    return sorted(of_results if of_configs is None else of_configs & of_results)


def _from_layers(query: sa.Select[Any], results: Results, layers: Sequence[int]) -> sa.Select[Any]:
    """Read the results of these layers first, by the index on the config: MariaDB would begin with
    the smallest table and read all results."""
    for dialect in ("mysql", "mariadb"):
        query = query.prefix_with("STRAIGHT_JOIN", dialect=dialect)
    index = f"ix_{results.table.name}_config_id"
    return query.with_hint(results.table, f"FORCE INDEX ({index})").where(
        results["config_id"].in_(layers)
    )


def _results(
    connection: sa.Connection, meant: Conditions, layers: Sequence[int], limit: int
) -> list[Any]:
    """Results of these configs, one more than the limit of each source."""
    found: list[Any] = []
    for results in BOTH:
        own = _OF_ENTRY if results.released else ()
        rows = _from_layers(results.select(*_COPIED, *_READ, *own), results, layers)
        order = (
            results["config_id"],
            results["time_ms"].is_(None),
            results["time_ms"],
            results["solver"],
            results["session_id"],
            results["id"],
        )
        found += connection.execute(
            rows.where(*meant.of(results, of_layers=True)).order_by(*order).limit(limit + 1)
        )
    return sorted(found, key=_place)


def _fastest(connection: sa.Connection, meant: Conditions, layers: Sequence[int]) -> list[Any]:
    """The fastest result of each of these configs and each source, a baseline where it is the only
    one."""
    found: list[Any] = []
    for results in BOTH:
        order = (
            results["family"] == BASELINE,
            *(results[name] for name in ("time_ms", "solver", "id")),
        )
        place = sa.func.row_number().over(partition_by=results["config_id"], order_by=order)
        ranked = results.over([results["id"], place.label("place")], ("time_ms", "family"))
        timed = (results["time_ms"].is_not(None), *meant.of(results, of_layers=True))
        first = _from_layers(ranked, results, layers).where(*timed).subquery()
        rows = results.select(*_COPIED, *_READ, *(_OF_ENTRY if results.released else ()))
        rows = rows.join(first, first.c.id == results["id"]).where(first.c.place == 1)
        found += connection.execute(rows)
    return found


def _place(row: Any) -> tuple[Any, ...]:
    last = (row.solver, row.session_id, row.golden or 0, row.environment)
    return (row.config_id, row.time_ms is None, row.time_ms or 0.0, *last)


#: Types of the values of a cursor, with those that JSON gives for them
_KINDS: tuple[set[type], ...] = ({int}, {bool}, {int, float}, {str}, {int}, {int}, {str})
_KINDS_OF_TRIAL: tuple[set[type], ...] = ({int}, {int, float}, {str}, {str}, {int}, {int})


def _place_of_trial(row: Any) -> tuple[Any, ...]:
    last = (row.solver, row.params or "", row.session_id, row.trial_number or 0)
    return (row.config_id, row.time_ms, *last)


def _trials(connection: sa.Connection, meant: Conditions, layers: Sequence[int]) -> list[Any]:
    """The fastest trials of each of these configs, solver and environment, with results that were
    imported.

    Equal times are ordered by params, so that the choice does not depend on the order in which they
    were stored.
    """
    n_best = meant.wanted.n_best
    key = (TRIALS["config_id"], TRIALS["solver_id"], TRIALS["environment_id"])
    fastest = (TRIALS["time_ms"], TRIALS["params"], TRIALS["session_id"], TRIALS["trial_number"])
    place = sa.func.row_number().over(partition_by=key, order_by=fastest).label("place")
    ranked = (
        _from_layers(
            TRIALS.over([TRIALS["trial_id"], place], ("environment_id", "time_ms")), TRIALS, layers
        )
        .where(*TRIALS.measured, *meant.of(TRIALS, of_layers=True))
        .subquery()
    )
    measured = (
        _from_layers(TRIALS.select(*_COPIED, *_READ), TRIALS, layers)
        .join(ranked, ranked.c.id == TRIALS["trial_id"])
        .where(ranked.c.place <= n_best)
    )
    imported = _from_layers(SESSIONS.select(*_COPIED, *_READ), SESSIONS, layers).where(
        *meant.of(SESSIONS, of_layers=True),
        SESSIONS["job_id"].is_(None),
        SESSIONS["time_ms"] > 0,
        SESSIONS["imported"],
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
    return sorted(chosen, key=_place_of_trial)


def _described(
    connection: sa.Connection, rows: Sequence[Any], *, with_commands: bool
) -> Iterator[ResultRow]:
    """The rows with who measured them, and how it is repeated."""
    jobs = {row.job_id for row in rows if row.job_id is not None}
    attempts, ended = last_good_attempts(connection, jobs), why_ended(connection, jobs)
    commands = _commands(connection, rows, attempts) if with_commands else [""] * len(rows)
    for row, command in zip(rows, commands, strict=True):
        attempt = None if row.source else attempts.get(row.job_id)
        worker, device = (row.worker, row.device) if row.golden is not None else ("", "")
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
            worker=worker or (attempt.worker if attempt else ""),
            device=device or (attempt.device if attempt else "") or row.environment_device,
            measured_at=row.kept_at,
            command=command,
        )


def _commands(
    connection: sa.Connection, rows: Sequence[Any], attempts: Mapping[int, GoodAttempt]
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


def _other_command(row: Any) -> str:
    """Return the command that shows more of a result that cannot be measured again here."""
    if row.golden is not None:
        words = ["golden", "explain", str(row.golden), str(row.id), "--library", row.library]
    else:
        words = ["query", "--session-id", str(row.session_id), "--solver", row.solver]
        words += ["--layer", row.config_key, "--json"]
    return shlex.join(["tuna", *words])
