"""What the exporters read from SQL: the winners of a session, in a total order, without holding them all."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from itertools import groupby
from typing import Any, NamedTuple

import sqlalchemy as sa

from tuna.configs import ConvConfig, conv
from tuna.configs.problem_key import NoKey
from tuna.db.models import Config, ConfigTag, Environment, FindDb, FindDbKernel, Kernel, Session, Solver, Trial
from tuna.db.models import ConvConfig as ConvRow
from tuna.errors import NotFound
from tuna.exports.find_db import time_text

_FETCH_ROWS = 5000
_CONV_COLUMNS = [ConvRow.__table__.c[name] for name in conv.FIELDS]


@dataclass(frozen=True)
class SessionInfo:
    """The session that is exported, and its environment."""

    id: int
    reason: str
    environment_key: str
    library: str
    arch: str
    num_cu: int
    target: str


class Winner(NamedTuple):
    """A row of the find db with what names it; `params` and `driver` are empty unless asked for."""

    config_id: int
    config_key: str
    kind: str
    conv: ConvConfig | None
    solver: str
    algorithm: str
    tunable: bool
    time_ms: float
    workspace_bytes: int
    job_id: int
    trial_number: int
    kernel: str
    workload: str
    params: str
    driver: str


class Entry(NamedTuple):
    """A winner as the exporters take it: sorted by the first three; `key` groups what answers the same question."""

    key: str
    time_ms: float
    solver: str
    name: str  #: what else the format needs of the config (its find-db key or its direction)
    config_key: str
    algorithm: str
    workspace_bytes: int
    job_id: int
    trial_number: int
    kernel: str
    workload: str
    params: str
    driver: str


def session_info(connection: sa.Connection, session_id: int) -> SessionInfo:
    """The session; raises NotFound."""
    query = sa.select(
        Session.id,
        Session.reason,
        Environment.key,
        Environment.library,
        Environment.arch,
        Environment.num_cu,
        Environment.target,
    ).join(Environment, Environment.id == Session.environment_id)
    row = connection.execute(query.where(Session.id == session_id)).one_or_none()
    if row is None:
        raise NotFound(f"There is no session {session_id}.")
    return SessionInfo(*row)


def check_tag(connection: sa.Connection, tag: str) -> None:
    """Raise NotFound unless some config has the tag."""
    if connection.execute(sa.select(ConfigTag.tag).where(ConfigTag.tag == tag).limit(1)).first() is None:
        raise NotFound(f"There is no config with the tag {tag!r}.")


def winners(
    connection: sa.Connection, session_id: int, tag: str | None, *, params: bool = False, driver: bool = False
) -> Iterator[Winner]:
    """The session's find-db rows, config by config, streamed: the cost of memory does not depend on their number.

    Served by the unique index (session_id, config_id, solver_id).
    """
    query = (
        sa.select(
            FindDb.config_id,
            Config.key,
            Config.kind,
            Solver.name,
            Solver.algorithm,
            Solver.tunable,
            FindDb.time_ms,
            FindDb.workspace_bytes,
            FindDb.job_id,
            FindDb.trial_number,
            sa.func.coalesce(FindDbKernel.kernel, ""),
            sa.func.coalesce(FindDb.workload, ""),
            FindDb.params if params else sa.literal(""),
            Config.driver if driver else sa.literal(""),
            *_CONV_COLUMNS,
        )
        .join(Config, Config.id == FindDb.config_id)
        .join(Solver, Solver.id == FindDb.solver_id)
        .outerjoin(ConvRow, ConvRow.config_id == FindDb.config_id)
        .outerjoin(FindDbKernel, sa.and_(FindDbKernel.find_db_id == FindDb.id, FindDbKernel.number == 0))
        .where(FindDb.session_id == session_id)
        .order_by(FindDb.config_id)
    )
    if tag is not None:
        query = query.join(ConfigTag, sa.and_(ConfigTag.config_id == FindDb.config_id, ConfigTag.tag == tag))
    first_field = 14
    config_id, config = None, None
    for row in connection.execute(query, execution_options={"yield_per": _FETCH_ROWS}):
        if row[0] != config_id:
            config_id, config = row[0], _conv(row[first_field:])
        before, after = tuple(row[:3]), tuple(row[3:first_field])
        yield Winner._make((*before, config, *after))


def _conv(fields: Iterable[Any]) -> ConvConfig | None:
    values = dict(zip(conv.FIELDS, fields, strict=True))
    return None if values["spatial_dim"] is None else conv.build(values)


def entries(
    rows: Iterable[Winner],
    name: Callable[[Winner], tuple[str, str]],
    refuse: Callable[[Winner], str],
    skipped: Counter[str],
) -> Iterator[tuple[Any, ...]]:
    """Winners as `Entry` fields to be sorted.

    `name` gives (key, name) of a config or raises NoKey, `refuse` the reason why a row is not wanted or "". What has no
    key or no usable time or is refused is dropped and counted.
    """
    config_id, key, config_name, problem = -1, "", "", ""
    for row in rows:
        if row.config_id != config_id:
            config_id, problem = row.config_id, ""
            try:
                key, config_name = name(row)
            except NoKey as error:
                problem = str(error)
        reason = problem or ("" if time_text(row.time_ms) else "its time is not a positive number") or refuse(row)
        if reason:
            skipped[reason] += 1
        else:
            # fmt: off
            yield (key, row.time_ms, row.solver, config_name, row.config_key, row.algorithm, row.workspace_bytes,
                   row.job_id, row.trial_number, row.kernel, row.workload, row.params, row.driver)
            # fmt: on


def groups(rows: Iterable[tuple[Any, ...]], skipped: Counter[str]) -> Iterator[tuple[str, list[Entry]]]:
    """Sorted entries by key, each solver once: its best time wins, the others are counted."""
    for key, group in groupby(map(Entry._make, rows), lambda entry: entry.key):
        best: dict[str, Entry] = {}
        for entry in group:
            if best.setdefault(entry.solver, entry) is not entry:
                skipped["another config with the same key has a better time"] += 1
        yield key, list(best.values())


def blob(connection: sa.Connection, digest: str) -> bytes | None:
    """The stored bytes with this SHA-256, None if there are none."""
    return connection.execute(sa.select(Kernel.blob).where(Kernel.digest == digest)).scalar_one_or_none()


def good_trials(connection: sa.Connection, job_id: int, at_least_ms: float, limit: int) -> list[tuple[int, float, str]]:
    """(number, time in ms, params) of the fastest good trials of a job that took `at_least_ms` or longer."""
    query = (
        sa.select(Trial.number, Trial.time_ms, Trial.params)
        .where(Trial.job_id == job_id, Trial.cause.is_(None), Trial.time_ms >= at_least_ms, Trial.params.is_not(None))
        .order_by(Trial.time_ms, Trial.number)
        .limit(limit)
    )
    return [(number, time_ms or 0.0, params or "") for number, time_ms, params in connection.execute(query)]
