"""The command lines that repeat attempts: made of the jobs in SQL when they are printed, never of what a worker says."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable
from dataclasses import replace
from typing import Any, NamedTuple

import sqlalchemy as sa
import structlog

from tuna.db.batches import parts
from tuna.db.engine import reading
from tuna.db.models import Job
from tuna.db.overview import Failure, Overview
from tuna.libraries.base import Library
from tuna.libraries.items import WorkItem
from tuna.pipeline.scope import scopes_of
from tuna.pipeline.work_items import work_items

log = structlog.get_logger(__name__)

_COLUMNS = (
    *(Job.id, Job.session_id, Job.config_id, Job.solver_id, Job.options),
    *(Job.steps, Job.round, Job.attempt, Job.avoid),
)


class Repeated(NamedTuple):
    """What is to be repeated."""

    job_id: int
    step: str
    candidate: int | None = None  #: its index; None: all


def commands(connection: sa.Connection, wanted: Iterable[Repeated]) -> dict[Repeated, str]:
    """The commands, without those for jobs whose library is not installed here."""
    by_job: dict[int, list[Repeated]] = defaultdict(list)
    for one in wanted:
        by_job[one.job_id].append(one)
    rows: list[Any] = []
    for part in parts(sorted(by_job)):
        rows += connection.execute(sa.select(*_COLUMNS).where(Job.id.in_(part)))
    scopes = scopes_of(connection, {row.session_id for row in rows})
    groups: dict[tuple[int, str], list[Any]] = defaultdict(list)
    for row in rows:
        for step in {one.step for one in by_job[row.id]} if row.session_id in scopes else ():
            groups[row.session_id, step].append(row)
    found: dict[Repeated, str] = {}
    for (session_id, step), mine in groups.items():
        scope = scopes[session_id]
        for item in work_items(connection, scope, step, mine, bare=True):
            same = [one for one in by_job[item.job_id] if one.step == step]
            found |= {one: _command(scope.library, item, one.candidate) for one in same}
    return found


def with_commands(engine: sa.Engine, sessions: Iterable[Overview]) -> list[Overview]:
    """The same with the commands that repeat their failures."""
    found = list(sessions)
    with reading(engine) as connection:
        made = commands(connection, [_latest(failure) for session in found for failure in session.failures])
    return [
        replace(session, failures=tuple(replace(one, reproduce=made.get(_latest(one), "")) for one in session.failures))
        for session in found
    ]


def _latest(failure: Failure) -> Repeated:
    return Repeated(failure.job_id, failure.step)


def _command(library: Library, item: WorkItem, index: int | None) -> str:
    try:
        return library.reproduce(item, index)
    except Exception as error:  # a plug-in's own code, or a kind of config that is not installed here
        log.warning("no command repeats the job", job=item.job_id, fault=f"{type(error).__name__}: {error}")
        return ""
