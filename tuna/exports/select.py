"""Selects the results to export: a session or a golden version, and the queries for exporters."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import sqlalchemy as sa

from tuna.db.baselines import is_no_baseline
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
from tuna.db.searches import rounds_of
from tuna.db.types import timed
from tuna.errors import BadInput, NotFound
from tuna.libraries.results import KernelOf, SolverFacts


@dataclass(frozen=True)
class Selection:
    """The results of one session or golden version, and their target."""

    title: str  #: such as `Session 3`
    library: str
    arch: str
    num_cu: int  #: 0: of none, or of all
    target: str
    environment_key: str  #: of a session; empty where every result has its own
    toolchain: str  #: likewise
    rows: type[FindDb] | type[GoldenEntry]
    where: tuple[sa.ColumnElement[bool], ...]
    tag: str | None
    mixed: bool = False  #: results of several CU counts compete

    def column(self, name: str) -> Any:
        """A column of the results; NULL where they have no such."""
        return getattr(self.rows, name, sa.null())

    @property
    def key(self) -> sa.ColumnElement[Any]:
        """MIOpen's key of a result's config; where Tuna computes none, the one that a worker
        reported to an older version."""
        return sa.func.coalesce(Config.problem_key, self.column("problem_key"))

    @property
    def fields(self) -> dict[str, Any]:
        """The column of each of `results.FIELDS`."""
        facts = ("solver_id", "time_ms", "workspace_bytes", "params", "algorithm", "noisy")
        names = (*facts, "job_id", "trial_number", "workload")
        return {
            "result_id": self.column("id"),
            "config_key": Config.key,
            "driver": Config.driver,
            "problem_key": self.key,
            "problem": sa.func.coalesce(self.key, Config.driver),
            **{name: self.column(name) for name in names},
            "num_cu": GoldenEntry.num_cu if self.rows is GoldenEntry else sa.literal(self.num_cu),
            "measured_at": GoldenEntry.measured_at if self.mixed else sa.null(),
        }

    def chosen(self, query: sa.Select[Any]) -> sa.Select[Any]:
        """The query over these results and their configs only.

        Served by the unique index that begins with (session_id, config_id) or (golden_id, arch).
        """
        query = (
            query.select_from(self.rows)
            .join(Config, Config.id == self.column("config_id"))
            .where(*self.where)
        )
        if self.tag is not None:
            query = query.join(
                ConfigTag, sa.and_(ConfigTag.config_id == Config.id, ConfigTag.tag == self.tag)
            )
        return query


def count_simulated(connection: sa.Connection, selection: Selection) -> int:
    """How many of the results were timed by a stand-in; golden versions have none."""
    return _count(connection, selection, FindDb.simulated) if selection.rows is FindDb else 0


def count_noisy(connection: sa.Connection, selection: Selection) -> int:
    """How many of the results were not measured on a quiet device."""
    return _count(connection, selection, selection.column("noisy"))


def _count(connection: sa.Connection, selection: Selection, mark: Any) -> int:
    return int(
        connection.execute(
            selection.chosen(sa.select(sa.func.count()).where(mark == sa.true()))
        ).scalar_one()
    )


def of_session(connection: sa.Connection, session_id: int, tag: str | None) -> Selection:
    """A session's results; raises NotFound."""
    query = (
        sa.select(
            Environment.library,
            Environment.arch,
            Environment.num_cu,
            Environment.target,
            Environment.key,
            Environment.toolchain,
        )
        .join(Session, Session.environment_id == Environment.id)
        .where(Session.id == session_id)
    )
    row = connection.execute(query).one_or_none()
    if row is None:
        raise NotFound(f"There is no session {session_id}.")
    return Selection(
        f"Session {session_id}",
        row.library,
        row.arch,
        row.num_cu,
        row.target,
        row.key,
        row.toolchain,
        FindDb,
        (FindDb.session_id == session_id, is_no_baseline()),
        tag,
    )


def of_golden(
    connection: sa.Connection,
    library: str,
    version: int,
    arch: str,
    num_cu: int | None,
    tag: str | None,
) -> Selection:
    """A golden version's results for an architecture, for one CU count or for all; raises NotFound
    or BadInput."""
    if not arch:
        raise BadInput(
            "The export of a golden version needs an architecture.",
            hint="give it with --arch, such as gfx90a",
        )
    if num_cu is not None and num_cu < 1:
        raise BadInput(f"A device has at least one compute unit, not {num_cu}.")
    query = sa.select(Golden.id).where(Golden.library == library, Golden.version == version)
    golden_id = connection.execute(query).scalar_one_or_none()
    if golden_id is None:
        query = sa.select(Golden.version).where(Golden.library == library).order_by(Golden.version)
        there = ", ".join(map(str, connection.execute(query).scalars())) or "none yet"
        raise NotFound(
            f"There is no golden version {version} of {library}.", hint=f"versions: {there}"
        )
    where = [GoldenEntry.golden_id == golden_id, GoldenEntry.arch == arch]
    if num_cu is not None:
        where.append(GoldenEntry.num_cu == num_cu)
    title = (
        f"Golden version {version} of {library} for {arch}{f' with {num_cu} CUs' if num_cu else ''}"
    )
    return Selection(
        title,
        library,
        arch,
        num_cu or 0,
        "",
        "",
        "",
        GoldenEntry,
        tuple(where),
        tag,
        num_cu is None,
    )


def check_tag(connection: sa.Connection, tag: str) -> None:
    """Raise NotFound unless some config has the tag."""
    if (
        connection.execute(sa.select(ConfigTag.tag).where(ConfigTag.tag == tag).limit(1)).first()
        is None
    ):
        raise NotFound(f"There is no config with the tag {tag!r}.")


def solvers(connection: sa.Connection, library: str) -> dict[int, SolverFacts]:
    """The library's solvers by id."""
    query = sa.select(Solver.id, Solver.name, Solver.algorithm, Solver.tunable).where(
        Solver.library == library
    )
    return {row[0]: SolverFacts(*row[1:]) for row in connection.execute(query)}


def kinds_without_key(connection: sa.Connection, selection: Selection) -> dict[str, int]:
    """How many results have no key, by their config's kind."""
    counts: tuple[Any, ...] = (Config.kind, sa.func.count())
    query = selection.chosen(
        sa.select(*counts).where(selection.key.is_(None)).group_by(Config.kind)
    )
    return {row[0]: row[1] for row in connection.execute(query)}


def kernels(connection: sa.Connection, source: Selection, ids: Sequence[int]) -> list[KernelOf]:
    """The code objects of these results, in the order of the ids; one without a digest for a result
    without any."""
    row: Any = source.rows
    kernel: Any = FindDbKernel if source.rows is FindDb else GoldenKernel
    owner = FindDbKernel.find_db_id if source.rows is FindDb else GoldenKernel.golden_entry_id
    environment: Any = (
        sa.literal(source.environment_key) if source.environment_key else Environment.key
    )
    query = (
        sa.select(
            row.id,
            Solver.name,
            Config.key,
            Config.driver,
            environment,
            kernel.kernel,
            kernel.name,
            kernel.args,
        )
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


def good_trials(
    connection: sa.Connection, job_id: int, at_least_ms: float, limit: int
) -> list[tuple[int, float, str]]:
    """(number, time in ms, params) of the fastest good trials of a job, or of all rounds of its
    search, that took `at_least_ms` or longer."""
    query = (
        sa.select(Trial.number, Trial.time_ms, Trial.params)
        .where(
            Trial.job_id.in_(rounds_of(job_id)), timed(Trial.time_ms), Trial.time_ms >= at_least_ms
        )
        .where(Trial.cause.is_(None), Trial.params.is_not(None), Trial.ended_early.is_(False))
        .order_by(Trial.time_ms, Trial.job_id, Trial.number)
        .limit(limit)
    )
    return [
        (number, time_ms or 0.0, params or "")
        for number, time_ms, params in connection.execute(query)
    ]


def kernels_of(
    connection: sa.Connection, library: str, arch: str, num_cu: int | None, keys: Sequence[str]
) -> dict[tuple[str, str], list[list[KernelOf]]]:
    """By key and solver, for each session that measured it on this device: its kernels."""
    key = sa.func.coalesce(Config.problem_key, FindDb.problem_key)
    kernel = (FindDbKernel.kernel, FindDbKernel.name, FindDbKernel.args)
    columns: tuple[Any, ...] = (
        key,
        FindDb.id,
        Solver.name,
        Config.key,
        Config.driver,
        Environment.key,
        *kernel,
    )
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
    by_result: dict[tuple[str, str], dict[int, list[KernelOf]]] = {}
    for key_text, *values in connection.execute(query):
        found = KernelOf(*values)
        results = by_result.setdefault((key_text, found.solver), {})
        results.setdefault(found.result_id, []).append(found)
    return {name: list(results.values()) for name, results in by_result.items()}
