"""Deleting a session: its jobs, trials and results, and the artifacts that nothing else needs."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field

import sqlalchemy as sa

from tuna.common.messages import counted
from tuna.db import sessions
from tuna.db.bulk import parts
from tuna.db.engine import reading, transaction
from tuna.db.models import (
    ConfigRow,
    FindDb,
    FindDbKernel,
    GoldenEntry,
    GoldenKernel,
    Job,
    KernelRow,
    NoSolver,
    PredictorRow,
    Search,
    Session,
    SolverApplicability,
    TrialRow,
    WarmStartRow,
)
from tuna.errors import BadInput
from tuna.golden.versions import of_session
from tuna.jobs import needed_artifacts
from tuna.vocabulary import IN_FLIGHT, GoldenState

#: Number of rows that are deleted in one transaction, with the rows that belong to them: results,
#: jobs, configs
_RESULTS, _JOBS, _CONFIGS = 1000, 500, 500
#: Columns that refer to `kernel`
_KERNEL_COLUMNS = (
    FindDb.workload,
    FindDbKernel.kernel,
    GoldenEntry.workload,
    GoldenKernel.kernel,
    ConfigRow.body,
    WarmStartRow.digest,
    PredictorRow.model,
    PredictorRow.tables,
)


@dataclass
class Deleted:
    """Counts of what was deleted."""

    jobs: int = 0
    results: int = 0
    kernels: int = 0  #: number of artifacts in SQL
    chunks: set[str] = field(default_factory=set)  #: ids of the chunks of its jobs
    #: golden versions that refer to the session, so that its row stays
    golden: tuple[str, ...] = ()

    def add(self, other: Deleted) -> None:
        """Count what one transaction deleted."""
        self.jobs += other.jobs
        self.results += other.results
        self.kernels += other.kernels
        self.chunks |= other.chunks


def check(connection: sa.Connection, session_id: int, *, cancels: bool = False) -> None:
    """Raise NotFound, or BadInput for a session that cannot be deleted now.

    `cancels`: its jobs will be canceled before.
    """
    sessions.get(connection, session_id)
    running = sa.select(sa.func.count()).where(
        Job.session_id == session_id, Job.state.in_([state.value for state in IN_FLIGHT])
    )
    if not cancels and (count := connection.execute(running).scalar_one()):
        raise BadInput(
            f"Session {session_id} has {counted(count, 'job')} with workers or in queues.",
            hint=f"cancel them: `tuna cancel --session-id {session_id}`, or add --cancel",
        )
    if drafts := of_session(connection, session_id, GoldenState.DRAFT):
        raise BadInput(
            f"The draft of {drafts[0]} has results of session {session_id}, which its promotion"
            " needs.",
            hint=f"promote it first: `tuna golden promote {drafts[0].version}`",
        )


def delete(
    engine: sa.Engine,
    session_id: int,
    remove: Callable[[set[str]], None],
    on_jobs: Callable[[int, int], None] | None = None,
) -> Deleted:
    """Delete a session that `check` accepts, in short transactions; repeatable if interrupted.

    Golden versions keep what they need: their entries, their artifacts, and the session's own row.
    `remove` is given the artifacts of the store that no job needs any more; `on_jobs` gets the
    number of deleted jobs, and of all.
    """
    done = Deleted()
    with reading(engine) as connection:
        jobs = connection.execute(
            sa.select(sa.func.count()).where(Job.session_id == session_id)
        ).scalar_one()
    while (deleted := transaction(engine, _delete_results, session_id)).results:
        done.add(deleted)
    while ids := _next_jobs(engine, session_id):
        # before the rows that name them: killed in between, the same command finds them again
        with reading(engine) as connection:
            unneeded = _unneeded(connection, ids)
        remove(unneeded)
        done.add(transaction(engine, _delete_jobs, ids))
        if on_jobs:
            on_jobs(done.jobs, max(jobs, done.jobs))
    while learned := transaction(engine, _delete_searches, session_id):
        done.add(learned)
    while transaction(engine, _delete_applicability, session_id):
        pass
    done.golden = transaction(engine, _delete_session, session_id)
    return done


def _delete_session(connection: sa.Connection, session_id: int) -> tuple[str, ...]:
    """Delete the session's row, unless golden versions have results of it: then return those."""
    golden = tuple(f"{one.version} of {one.library}" for one in of_session(connection, session_id))
    if not golden:
        connection.execute(sa.delete(Session).where(Session.id == session_id))
    return golden


def _delete_results(connection: sa.Connection, session_id: int) -> Deleted:
    query = (
        sa.select(FindDb.id, FindDb.workload).where(FindDb.session_id == session_id).limit(_RESULTS)
    )
    found = connection.execute(query).all()
    ids = [row.id for row in found]
    code = sa.select(FindDbKernel.kernel).where(FindDbKernel.find_db_id.in_(ids)).distinct()
    digests = {
        *connection.execute(code).scalars(),
        *(row.workload for row in found if row.workload),
    }
    connection.execute(sa.delete(FindDb).where(FindDb.id.in_(ids)))
    return Deleted(results=len(found), kernels=_delete_kernels(connection, digests))


def _delete_kernels(connection: sa.Connection, digests: Iterable[str]) -> int:
    """Delete artifacts of SQL without references; return their number."""
    count = 0
    for part in parts(sorted(digests)):
        # Locked first, because a drain that has seen one refers to it before it commits.
        lock = sa.select(KernelRow.digest).where(KernelRow.digest.in_(part)).with_for_update()
        unused = set(connection.execute(lock).scalars())
        for column in _KERNEL_COLUMNS:
            unused -= set(
                connection.execute(sa.select(column).where(column.in_(part)).distinct()).scalars()
            )
        if unused:
            connection.execute(sa.delete(KernelRow).where(KernelRow.digest.in_(sorted(unused))))
        count += len(unused)
    return count


def _next_jobs(engine: sa.Engine, session_id: int) -> Sequence[int]:
    query = sa.select(Job.id).where(Job.session_id == session_id).order_by(Job.id).limit(_JOBS)
    with reading(engine) as connection:
        return connection.execute(query).scalars().all()


def _unneeded(connection: sa.Connection, ids: Sequence[int]) -> set[str]:
    """Return the artifacts of jobs that nothing else needs."""
    built = sa.select(TrialRow.artifact).where(TrialRow.job_id.in_(ids)).distinct()
    texts = sa.select(Job.workload).where(Job.id.in_(ids)).distinct()
    named = {*connection.execute(built).scalars(), *connection.execute(texts).scalars()}
    digests = {one for one in named if one} | needed_artifacts.of_jobs(connection, ids)
    return digests - needed_artifacts.in_use(connection, digests, beside=ids)


def _delete_jobs(connection: sa.Connection, ids: Sequence[int]) -> Deleted:
    query = sa.select(Job.chunk).where(Job.id.in_(ids)).with_for_update()
    chunks = connection.execute(query).scalars().all()
    needed_artifacts.settle(connection, ids)
    connection.execute(sa.delete(Job).where(Job.id.in_(ids)))
    return Deleted(jobs=len(chunks), chunks={chunk for chunk in chunks if chunk})


def _delete_searches(connection: sa.Connection, session_id: int) -> Deleted | None:
    """Delete searches, whose jobs are deleted, with the trials that they learned from; None: there
    was none."""
    query = sa.select(Search.id).where(Search.session_id == session_id).limit(_JOBS)
    ids: Sequence[int] = connection.execute(query).scalars().all()
    blocks = sa.select(WarmStartRow.digest).where(WarmStartRow.search_id.in_(ids)).distinct()
    learned = set(connection.execute(blocks).scalars())
    connection.execute(sa.delete(Search).where(Search.id.in_(ids)))
    return Deleted(kernels=_delete_kernels(connection, learned)) if ids else None


def _delete_applicability(connection: sa.Connection, session_id: int) -> bool:
    pair = SolverApplicability
    mine = pair.session_id == session_id
    query = (
        sa.select(pair.config_id).where(mine).distinct().order_by(pair.config_id).limit(_CONFIGS)
    )
    configs: Sequence[int] = connection.execute(query).scalars().all()
    connection.execute(sa.delete(pair).where(mine, pair.config_id.in_(configs)))
    if not configs:
        connection.execute(sa.delete(NoSolver).where(NoSolver.session_id == session_id))
    return bool(configs)
