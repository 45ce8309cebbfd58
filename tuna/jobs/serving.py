"""The sessions that a coordinator serves, and the libraries of sessions, as it finds them in
SQL."""

from __future__ import annotations

import functools
from collections import Counter
from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from types import MappingProxyType

import sqlalchemy as sa

from tuna.db import sessions
from tuna.db.bulk import rows_among
from tuna.db.models import EnvironmentRow, Job, Session, StepResultRow
from tuna.db.session_options import DEFAULTS, SessionOptions
from tuna.jobs.open_steps import OpenStep
from tuna.jobs.states import CLAIMABLE
from tuna.libraries.base import Environment, Library, Step
from tuna.libraries.registry import find_library
from tuna.libraries.steps import every_step, served_steps
from tuna.vocabulary import IN_FLIGHT, SEARCH, Resource, queue_name

#: Number of latest attempts that are looked at; a drain writes about 5000 in one transaction at
#: most
_LATEST_ATTEMPTS = 10_000


def libraries_of(connection: sa.Connection, session_ids: Iterable[int]) -> dict[int, Library | str]:
    """The library of each session, or its name where it is not installed here.

    A drain or a reaper handles the jobs of all sessions of the database, of which some may be
    another coordinator's.
    """
    return {
        key: find_library(name) or name
        for key, name in sessions.libraries(connection, session_ids).items()
    }


@dataclass(frozen=True)
class SessionWork:
    """The facts about a session that a coordinator needs."""

    session_id: int
    environment: Environment
    library: Library
    options: SessionOptions = DEFAULTS
    #: names of the steps to serve; empty: all that the library has
    only: Sequence[str] = ()

    @property
    def steps(self) -> Sequence[Step]:
        """The steps that are served, in order."""
        mine = {step.name for step in every_step(self.library)}
        names = [name for name in self.only if name in mine]
        return served_steps(self.library, names) if names or not self.only else []

    def queue(self, step: Step) -> str:
        """The queue of the step."""
        return queue_name(
            step.resource is Resource.DEVICE, self.environment.toolchain, self._machine_key
        )

    @functools.cached_property
    def _machine_key(self) -> str:
        return self.environment.machine_key

    def open_steps(self) -> list[OpenStep]:
        """The steps, as a policy sees them, the last one first."""
        return [
            OpenStep(
                self.session_id,
                step.name,
                self.queue(step),
                self.options.priority,
                remaining,
                continues=self._continues(step),
            )
            for remaining, step in enumerate(reversed(self.steps))
        ]

    @property
    def rounds_go_on(self) -> bool:
        """Whether a search's next round begins in the queue in which the last one ended, without
        keeping a process for all."""
        search, resources = self.library.search, {step.resource for step in self.library.steps}
        return (
            search is not None
            and search.step.resource is self.library.steps[-1].resource
            and len(resources) > 1
        )

    def further_rounds(self) -> list[OpenStep]:
        """The rounds after their searches' first that wait to be proposed, as a policy sees them,
        where they go on."""
        search = self.library.search
        if search is None or search.step not in self.steps or not self.rounds_go_on:
            return []
        return [replace(step, continues=True) for step in self.open_steps() if step.step == SEARCH]

    def _continues(self, step: Step) -> bool:
        """Whether jobs come to the step from another one in the same queue; finals and searches are
        first steps."""
        names = [one.name for one in self.library.steps]
        place = names.index(step.name) if step.name in names else 0
        search = self.library.search.step if self.library.search else None
        before = self.library.steps[place - 1] if place else search
        return step.name in names and before is not None and before.resource is step.resource


def read_works(
    connection: sa.Connection,
    session_ids: Collection[int] | None,
    steps: Sequence[str] = (),
    known: Mapping[int, SessionWork] = MappingProxyType({}),
) -> list[SessionWork]:
    """These sessions, or with None all that have open jobs and no owner; without those whose
    library is not installed here.

    `known`: those that were read before, of which only the options may have changed, or
    which were deleted. Raises NotFound for another unknown session.
    """
    ids = _open(connection) if session_ids is None else list(session_ids)
    query = sa.select(Session.id, Session.options).where(Session.id.in_(ids))
    now = {row.id: SessionOptions.stored(row.options) for row in connection.execute(query)}
    if session_ids is None:
        ids = [key for key in ids if key in now and now[key].owner is None]
    works = [replace(known[key], options=now[key]) for key in ids if key in known and key in now]
    for session_id in (key for key in ids if key not in known):
        info = sessions.get(connection, session_id)
        library = find_library(info.environment.library)
        if library is not None:
            work = SessionWork(
                session_id,
                info.environment,
                library,
                info.options,
                tuple(steps),
            )
            works.append(work)
    return works


def lately_worked(connection: sa.Connection) -> set[int]:
    """Return the sessions of the latest attempts, among them those of the last transaction of a
    drain that was killed."""
    latest = (
        sa.select(StepResultRow.job_id)
        .order_by(StepResultRow.id.desc())
        .limit(_LATEST_ATTEMPTS)
        .subquery()
    )
    query = sa.select(Job.session_id).join(latest, latest.c.job_id == Job.id).distinct()
    return set(connection.execute(query).scalars())


def works_of(connection: sa.Connection, session_ids: Collection[int]) -> dict[int, SessionWork]:
    """The sessions whose library is installed here, by id; raises NotFound for an unknown one."""
    return {work.session_id: work for work in read_works(connection, session_ids)}


def open_queues(connection: sa.Connection, work: SessionWork) -> set[str]:
    """Return the queues that unfinished jobs of the session have still to go through, or may by
    what is served of it."""
    steps = every_step(work.library)
    waits = [
        sa.exists().where(  # index ix_job_claim (session_id, step, state, id)
            Job.session_id == work.session_id, Job.step == step.name, _is_unfinished(step.resource)
        )
        for step in steps
    ]
    found = connection.execute(sa.select(*waits)).one()
    if not any(found):
        return set()
    # What is searched goes through all steps again.
    first = 0 if work.library.search else [bool(one) for one in found].index(True)
    return {work.queue(step) for step in steps[first:] if step in work.steps}


def _is_unfinished(resource: Resource) -> sa.ColumnElement[bool]:
    states = {*CLAIMABLE[resource], *IN_FLIGHT}
    return Job.state.in_(sorted(state.value for state in states))


def chunks_before(
    connection: sa.Connection,
    chunks: Collection[str],
    untaken: Collection[str],
    works: Collection[SessionWork],
) -> dict[int, int]:
    """By session that is none of `works`: how many of `chunks` are of a queue which `works` wait
    for.

    Empty if a worker does a chunk of `works`; `untaken`: those of `chunks` that no worker took.
    """
    queues = {work.queue(step) for work in works for step in work.steps}
    ids = {work.session_id for work in works}
    counts: Counter[int] = Counter()
    query = sa.select(Job.chunk, Job.session_id).distinct()
    for row in rows_among(connection, query, Job.chunk, chunks):
        if row.session_id not in ids:
            counts[row.session_id] += 1
        elif row.chunk not in untaken:
            return {}
    others = read_works(connection, sorted(counts))
    return {
        work.session_id: counts[work.session_id]
        for work in others
        if not queues.isdisjoint(work.queue(step) for step in work.steps)
    }


def _open(connection: sa.Connection) -> list[int]:
    """Sessions with jobs that are not at their end, of libraries that are installed here."""
    ids: list[int] = []
    for name in connection.execute(sa.select(EnvironmentRow.library).distinct()).scalars().all():
        library = find_library(name)
        if library is None:
            continue
        unfinished = [
            sa.and_(
                Job.step.in_(
                    [step.name for step in every_step(library) if step.resource is resource]
                ),
                _is_unfinished(resource),
            )
            for resource in Resource
        ]
        # Index ix_job_claim (session_id, step, state, id), once for each session: a scalar subquery
        # is not made a join.
        job = (
            sa.select(Job.id)
            .where(Job.session_id == Session.id, sa.or_(*unfinished))
            .limit(1)
            .scalar_subquery()
        )
        query = (
            sa.select(Session.id, job.label("job"))
            .join(EnvironmentRow, EnvironmentRow.id == Session.environment_id)
            .where(EnvironmentRow.library == name)
        )
        ids += [row.id for row in connection.execute(query) if row.job is not None]
    return sorted(ids)
