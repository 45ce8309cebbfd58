"""What the exporters read from SQL: the results of a session or of a golden version, streamed."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from datetime import datetime
from itertools import groupby
from operator import itemgetter
from typing import Any, NamedTuple

import sqlalchemy as sa

from tuna.db.models import (
    Config,
    ConfigTag,
    Environment,
    FindDb,
    FindDbKernel,
    Golden,
    GoldenEntry,
    GoldenKernel,
    Kernel,
    Session,
    Solver,
    Trial,
)
from tuna.errors import BadInput, NotFound
from tuna.exports import kernel_db
from tuna.exports.find_db import time_text

_FETCH_ROWS = 5000
_BATCH = 500
NO_TIME = "its time is not a positive number"


@dataclass(frozen=True)
class Source:
    """Whose results are exported, and for what."""

    title: str  #: such as `Session 3`
    library: str
    arch: str
    num_cu: int  #: 0: of none, or of all
    target: str
    environment_key: str  #: of a session; empty where every result has its own
    rows: type[FindDb] | type[GoldenEntry]
    where: tuple[sa.ColumnElement[bool], ...]
    mixed: bool = False  #: results of several CU counts compete: then the latest of a solver counts, not the fastest

    def column(self, name: str) -> Any:
        """A column of the results."""
        return getattr(self.rows, name)

    @property
    def key(self) -> sa.ColumnElement[Any]:
        """MIOpen's key of a result: what the library itself called the problem, else the config's."""
        return sa.func.coalesce(self.column("problem_key"), Config.problem_key)

    @property
    def age(self) -> tuple[Any, ...]:
        """What `age_of` reads; nothing where it does not matter."""
        return (GoldenEntry.measured_at, GoldenEntry.num_cu) if self.mixed else ()


def session_source(connection: sa.Connection, session_id: int) -> Source:
    """A session's results; raises NotFound."""
    query = (
        sa.select(Environment.library, Environment.arch, Environment.num_cu, Environment.target, Environment.key)
        .join(Session, Session.environment_id == Environment.id)
        .where(Session.id == session_id)
    )
    row = connection.execute(query).one_or_none()
    if row is None:
        raise NotFound(f"There is no session {session_id}.")
    return Source(
        f"Session {session_id}",
        row.library,
        row.arch,
        row.num_cu,
        row.target,
        row.key,
        FindDb,
        (FindDb.session_id == session_id,),
    )


def golden_source(connection: sa.Connection, library: str, version: int, arch: str, num_cu: int | None) -> Source:
    """A golden version's results for an architecture, for one CU count or for all; raises NotFound or BadInput."""
    if not arch:
        raise BadInput("The export of a golden version needs an architecture.", hint="give it with -a, such as gfx90a")
    if num_cu is not None and num_cu < 1:
        raise BadInput(f"A device has at least one compute unit, not {num_cu}.")
    query = sa.select(Golden.id).where(Golden.library == library, Golden.version == version)
    golden_id = connection.execute(query).scalar_one_or_none()
    if golden_id is None:
        query = sa.select(Golden.version).where(Golden.library == library).order_by(Golden.version)
        there = ", ".join(map(str, connection.execute(query).scalars())) or "none yet"
        raise NotFound(f"There is no golden version {version} of {library}.", hint=f"versions: {there}")
    where = [GoldenEntry.golden_id == golden_id, GoldenEntry.arch == arch]
    if num_cu is not None:
        where.append(GoldenEntry.num_cu == num_cu)
    title = f"Golden version {version} of {library} for {arch}{f' with {num_cu} CUs' if num_cu else ''}"
    return Source(title, library, arch, num_cu or 0, "", "", GoldenEntry, tuple(where), num_cu is None)


def check_tag(connection: sa.Connection, tag: str) -> None:
    """Raise NotFound unless some config has the tag."""
    if connection.execute(sa.select(ConfigTag.tag).where(ConfigTag.tag == tag).limit(1)).first() is None:
        raise NotFound(f"There is no config with the tag {tag!r}.")


class SolverFacts(NamedTuple):
    """What exporters need of a solver."""

    name: str
    algorithm: str
    tunable: bool


def solvers(connection: sa.Connection, library: str) -> dict[int, SolverFacts]:
    """The library's solvers by id."""
    query = sa.select(Solver.id, Solver.name, Solver.algorithm, Solver.tunable).where(Solver.library == library)
    return {row[0]: SolverFacts(*row[1:]) for row in connection.execute(query)}


def results(
    connection: sa.Connection, source: Source, tag: str | None, key: Any, columns: Sequence[Any], ordered: bool
) -> Iterator[tuple[Any, ...]]:
    """(key, columns) of the source's results that have a key, streamed: memory does not grow with their number.

    Served by the unique index that begins with (session_id, config_id) or (golden_id, arch). Where rows are `ordered`
    by key, the database sorts them, in a file when it must, by bytes: text columns have binary collations.
    """
    query = _chosen(sa.select(key, *columns), source, tag).where(key.is_not(None))
    if ordered:
        query = query.order_by(key)
    rows: Any = connection.execute(query, execution_options={"yield_per": _FETCH_ROWS})
    return iter(rows)


def _chosen(query: sa.Select[Any], source: Source, tag: str | None) -> sa.Select[Any]:
    query = query.select_from(source.rows).join(Config, Config.id == source.column("config_id")).where(*source.where)
    if tag is not None:
        query = query.join(ConfigTag, sa.and_(ConfigTag.config_id == Config.id, ConfigTag.tag == tag))
    return query


def count_keyless(connection: sa.Connection, source: Source, tag: str | None) -> dict[str, int]:
    """How many results have no key, by why."""
    counts: tuple[Any, ...] = (Config.kind, sa.func.count())
    query = sa.select(*counts).where(source.key.is_(None)).group_by(Config.kind)
    rows: Any = connection.execute(_chosen(query, source, tag))
    return {f"MIOpen has no key for a {kind} config": count for kind, count in rows}


def by_key(rows: Iterable[tuple[Any, ...]]) -> Iterator[tuple[str, Iterator[tuple[Any, ...]]]]:
    """Sorted rows in groups that share their first column."""
    return groupby(rows, key=itemgetter(0))


def perf_order(key: str) -> str:
    """What `ProblemKey.perf_order` makes of a find-db key, without taking it all apart; for no key, something else."""
    words = key.split("-")
    dims = 3 if len(words) > 4 and words[4].count("x") == 2 else 2
    if len(words) < 11 + 2 * dims:
        return key
    direction, _, options = words[-1].partition("_")
    groups = options.partition("_")[0]
    tail = f"{direction}_{groups}" if groups.startswith("g") else direction
    # Neither the extents of "out" nor the layouts of weights and "out" are in a perf db.
    return "-".join((*words[: dims + 3], *words[2 * dims + 3 : 2 * dims + 9], words[-2], tail))


def is_time(time_ms: float | None) -> bool:
    """Whether this can stand in a database as a time."""
    return time_ms is not None and time_text(time_ms) is not None


def age_of(age: Sequence[Any]) -> tuple[float, int]:
    """Smaller for what was measured later, then for fewer CUs; `age` has the columns of `Source.age`."""
    if not age:
        return 0.0, 0
    measured_at: datetime | None = age[0]
    return float("inf") if measured_at is None else -measured_at.timestamp(), age[1]


def one_each(entries: list[tuple[Any, ...]], mixed: bool, skipped: Counter[str]) -> list[tuple[Any, ...]]:
    """The entries (time, solver, ..., age) of one key, fastest first, each solver once; the others are counted."""
    entries.sort()
    if len({entry[1] for entry in entries}) == len(entries):
        return entries
    best: dict[str, tuple[Any, ...]] = {}
    for entry in sorted(entries, key=itemgetter(-1)) if mixed else entries:
        best.setdefault(entry[1], entry)
    reason = "a later result" if mixed else "another config with the same key has a better time"
    skipped[reason] += len(entries) - len(best)
    return sorted(best.values())


class KernelOf(NamedTuple):
    """A code object of a result; `digest` is None for a result without any."""

    result_id: int
    solver: str
    config_key: str
    driver: str
    environment_key: str
    digest: str | None
    name: str
    args: str

    def names(self, arch: str) -> tuple[str, str]:
        """The name and arguments that the loader asks for, by MIOpen's rule where the library named the kernel."""
        arch = arch.partition(":")[0]
        if not self.name:
            return (
                kernel_db.object_name(self.solver, self.config_key),
                kernel_db.object_args(self.driver, self.environment_key, arch),
            )
        name = self.name if self.name.endswith(".o") else f"{self.name}.o"
        complete = "-mcpu=" in self.args or name.endswith(".mlir.o")
        return name, self.args if complete else f"{self.args} -mcpu={arch}"


def kernels(connection: sa.Connection, source: Source, result_ids: Iterable[int]) -> Iterator[KernelOf]:
    """The code objects of these results, in the order of the ids, a few hundred results at a time."""
    batch: list[int] = []
    for result_id in result_ids:
        batch.append(result_id)
        if len(batch) == _BATCH:
            yield from _kernels(connection, source, batch)
            batch = []
    yield from _kernels(connection, source, batch)


def _kernels(connection: sa.Connection, source: Source, ids: Sequence[int]) -> list[KernelOf]:
    row: Any = source.rows
    kernel: Any = FindDbKernel if source.rows is FindDb else GoldenKernel
    owner = FindDbKernel.find_db_id if source.rows is FindDb else GoldenKernel.golden_entry_id
    environment: Any = sa.literal(source.environment_key) if source.environment_key else Environment.key
    query = (
        sa.select(row.id, Solver.name, Config.key, Config.driver, environment, kernel.kernel, kernel.name, kernel.args)
        .join(Config, Config.id == row.config_id)
        .join(Solver, Solver.id == row.solver_id)
        .outerjoin(kernel, owner == row.id)
        .where(row.id.in_(ids))
        .order_by(row.id, kernel.number)
    )
    if not source.environment_key:
        query = query.join(Environment, Environment.id == row.environment_id)
    found: dict[int, list[KernelOf]] = {result_id: [] for result_id in ids}
    for values in connection.execute(query):
        found[values[0]].append(KernelOf(*values))
    return [kernel for result_id in ids for kernel in found[result_id]]


def blob(connection: sa.Connection, digest: str) -> bytes:
    """The stored bytes with this SHA-256."""
    return connection.execute(sa.select(Kernel.blob).where(Kernel.digest == digest)).scalar_one()


def good_trials(connection: sa.Connection, job_id: int, at_least_ms: float, limit: int) -> list[tuple[int, float, str]]:
    """(number, time in ms, params) of the fastest good trials of a job that took `at_least_ms` or longer."""
    query = (
        sa.select(Trial.number, Trial.time_ms, Trial.params)
        .where(Trial.job_id == job_id, Trial.cause.is_(None), Trial.time_ms >= at_least_ms, Trial.params.is_not(None))
        .order_by(Trial.time_ms, Trial.number)
        .limit(limit)
    )
    return [(number, time_ms or 0.0, params or "") for number, time_ms, params in connection.execute(query)]


def total(skipped: Mapping[str, int]) -> str:
    """What was left out, as a sentence's end."""
    return "; ".join(f"{count} left out: {reason}" for reason, count in sorted(skipped.items()))


def kernels_of(
    connection: sa.Connection, library: str, arch: str, num_cu: int | None, keys: Sequence[str]
) -> dict[tuple[str, str], list[list[tuple[str, str]]]]:
    """By key and solver, for each session that measured it on this device: the names and arguments of its kernels."""
    key = sa.func.coalesce(FindDb.problem_key, Config.problem_key)
    kernel = (FindDbKernel.kernel, FindDbKernel.name, FindDbKernel.args)
    columns: tuple[Any, ...] = (key, FindDb.id, Solver.name, Config.key, Config.driver, Environment.key, *kernel)
    query = (
        sa.select(*columns)
        .join(Config, Config.id == FindDb.config_id)
        .join(Solver, Solver.id == FindDb.solver_id)
        .join(FindDbKernel, FindDbKernel.find_db_id == FindDb.id)
        .join(Session, Session.id == FindDb.session_id)
        .join(Environment, Environment.id == Session.environment_id)
        .where(Environment.library == library, Environment.arch == arch)
        .where(Config.problem_key.in_(keys) | FindDb.problem_key.in_(keys))
    )
    if num_cu is not None:
        query = query.where(Environment.num_cu == num_cu)
    by_result: dict[tuple[str, str], dict[int, list[tuple[str, str]]]] = {}
    for key_text, *values in connection.execute(query):
        found = KernelOf(*values)
        results = by_result.setdefault((key_text, found.solver), {})
        results.setdefault(found.result_id, []).append(found.names(arch))
    return {name: list(results.values()) for name, results in by_result.items()}
