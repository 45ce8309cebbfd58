"""Which artifacts the jobs that have not ended need, and so how long their bytes live: decided here
alone.

Artifacts are shared by content: one compiled by a job may be what another waits for. Table
`job_artifact` has a row for each artifact that a job needs, from the result that named it until the
job ends. A store that expires entries keeps what has a row, the files of imported models, and what
the rows of packages name; the rest expires. A package registers its table's name:

    [project.entry-points."tuna.artifact_users"]
    request = "my_package.requests:ARTIFACTS"

Nothing is removed while a table has rows that no installed package reads.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Sequence
from dataclasses import dataclass

import sqlalchemy as sa
import structlog

from tuna.artifacts.store import Artifacts
from tuna.db import networks
from tuna.db.bulk import parts, upsert, values_among
from tuna.db.engine import reading, transaction
from tuna.db.models import CacheEntryRow, Job, JobArtifact, RequestRow, TrialRow
from tuna.libraries.items import StepResult
from tuna.plugins import Plugins
from tuna.vocabulary import END_STATES, IN_FLIGHT, State

log = structlog.get_logger(__name__)

#: Seconds between two calls of `keep`; less than the grace of a released artifact
KEEP_EVERY_S = 300.0
_PAGE = 1000
#: States of a job that is, or will be, tried for a step that stores artifacts
_TRIED = frozenset(one.value for one in (State.NEW, State.SEARCHING, *IN_FLIGHT))


@dataclass(frozen=True)
class ArtifactUser:
    """A package's table whose rows name artifacts."""

    #: function of a connection and digests (None: all) that returns those of them that rows name
    digests: Callable[[sa.Connection, Collection[str] | None], set[str]]


USERS: Plugins[ArtifactUser] = Plugins("tuna.artifact_users", "user of artifacts", ArtifactUser)
#: Tables of the schema whose rows packages read
_OF_PACKAGES = (RequestRow, CacheEntryRow)


def note(connection: sa.Connection, results: Iterable[StepResult]) -> None:
    """Record what the jobs of these results need later: code of trials, what that refers to, the
    problem's text."""
    need(connection, ((result.job_id, digest) for result in results for digest in _named(result)))


def need(connection: sa.Connection, pairs: Iterable[tuple[int, str]]) -> None:
    """Record that jobs need artifacts, as (job, digest); a job that was deleted meanwhile needs
    none."""
    wanted = sorted(set(pairs))
    jobs = sa.select(Job.id).with_for_update()
    there = values_among(connection, jobs, Job.id, {job_id for job_id, _ in wanted})
    rows = [{"digest": digest, "job_id": job_id} for job_id, digest in wanted if job_id in there]
    upsert(connection, JobArtifact, rows, key=("digest", "job_id"))


def settle(connection: sa.Connection, job_ids: Sequence[int]) -> set[str]:
    """Forget the needs of jobs that end in this transaction; returns the artifacts that no job
    needs any more."""
    unneeded: set[str] = set()
    for part in parts(job_ids):
        mine = JobArtifact.job_id.in_(part)
        digests = set(connection.execute(sa.select(JobArtifact.digest).where(mine)).scalars())
        if digests:
            connection.execute(sa.delete(JobArtifact).where(mine))
            unneeded |= digests
    return unneeded - needed(connection, unneeded)


def needed(
    connection: sa.Connection, digests: Iterable[str], beside: Sequence[int] = ()
) -> set[str]:
    """Return the `digests` that a job needs, other than the jobs `beside`."""
    query = sa.select(JobArtifact.digest).distinct()
    if beside:
        query = query.where(JobArtifact.job_id.not_in(beside))
    return values_among(connection, query, JobArtifact.digest, digests)


def in_use(
    connection: sa.Connection, digests: Collection[str], beside: Sequence[int] = ()
) -> set[str]:
    """Return the `digests` that a job, a model or a package's row needs, all of them where rows
    cannot be read; `beside`: jobs that do not count."""
    if _has_unread_rows(connection):
        return set(digests)
    found = networks.files(connection).intersection(digests) | needed(connection, digests, beside)
    return found.union(*(user.digests(connection, digests) for user in USERS.all().values()))


def _has_unread_rows(connection: sa.Connection) -> bool:
    """Whether a table has rows that no installed package reads; logs that nothing is removed."""
    known = USERS.all()
    unread = [
        row.__tablename__
        for row in _OF_PACKAGES
        if row.__tablename__ not in known
        and connection.execute(sa.select(row.id).limit(1)).first() is not None
    ]
    if unread:
        hint = "install the package tuna-serve"
        log.warning("no artifact is removed: rows that name some", tables=unread, hint=hint)
    return bool(unread)


def abandoned(
    connection: sa.Connection, stored: Iterable[tuple[Collection[int], Collection[str]]]
) -> set[str]:
    """Return the digests, of pairs of jobs and what was stored for them without effect, that
    nothing needs.

    They are of pairs with canceled or deleted jobs, and none of which is tried again: a later
    attempt may store the same.
    """
    pairs = [(frozenset(jobs), digests) for jobs, digests in stored if digests]
    states: dict[int, str] = {}
    for part in parts(sorted(frozenset().union(*(jobs for jobs, _ in pairs)))):
        rows = connection.execute(sa.select(Job.id, Job.state).where(Job.id.in_(part)))
        states |= {row.id: row.state for row in rows}
    canceled = State.CANCELED.value
    left: set[str] = set()
    for jobs, digests in pairs:
        job_states = {states.get(job_id, canceled) for job_id in jobs}
        if canceled in job_states and job_states.isdisjoint(_TRIED):
            left.update(digests)
    if not left:
        return left
    alive = [job_id for job_id, state in states.items() if state != canceled]
    kept = values_among(connection, sa.select(TrialRow.artifact), TrialRow.job_id, alive)
    kept |= values_among(connection, sa.select(Job.workload), Job.id, alive)
    return left - kept - in_use(connection, left)


def of_jobs(connection: sa.Connection, job_ids: Sequence[int]) -> set[str]:
    """The artifacts that these jobs need."""
    query = sa.select(JobArtifact.digest)
    return values_among(connection, query, JobArtifact.job_id, job_ids)


def keep(engine: sa.Engine, artifacts: Artifacts) -> None:
    """Renew what jobs, models and packages' rows need, and release what canceled jobs, and those
    whose workers were lost, needed. Where rows cannot be read, everything is renewed.

    It may run in several coordinators at once. Memory is that of a page, whatever the number of
    jobs.
    """
    with reading(engine) as connection:
        files = networks.files(connection)
        all_needed = artifacts.expires and _has_unread_rows(connection)
        if artifacts.expires:
            files.update(*(user.digests(connection, None) for user in USERS.all().values()))
    artifacts.renew(files)
    if all_needed:
        artifacts.renew_all()
    last = ""
    while True:
        # 1: all of its jobs have
        ended = sa.func.min(sa.case((Job.state.in_(END_STATES), 1), else_=0))
        query = (  # primary key (digest, job_id): a range in order
            sa.select(
                JobArtifact.digest,
                ended.label("unneeded"),
                sa.func.max(Job.state.in_(END_STATES)).label("some"),
            )
            .join(Job, Job.id == JobArtifact.job_id)
            .where(JobArtifact.digest > last)
            .group_by(JobArtifact.digest)
            .order_by(JobArtifact.digest)
            .limit(_PAGE)
        )
        with reading(engine) as connection:
            page = connection.execute(query).all()
        if not page:
            return
        last = page[-1].digest
        some = [row.digest for row in page if row.some]
        if some:
            gone = (
                sa.select(Job.id)
                .where(Job.id == JobArtifact.job_id, Job.state.in_(END_STATES))
                .exists()
            )
            forget = sa.delete(JobArtifact).where(JobArtifact.digest.in_(some), gone)
            transaction(engine, sa.Connection.execute, forget)
        artifacts.renew(row.digest for row in page if not row.unneeded)
        artifacts.release(row.digest for row in page if row.unneeded and not all_needed)


def _named(result: StepResult) -> set[str]:
    found: set[str | None] = {
        result.workload,
        *(trial.artifact for trial in result.trials if trial.cause is None),
    }
    return {
        digest for digest in (*found, *(code.artifact for code in result.kernels or ())) if digest
    }
