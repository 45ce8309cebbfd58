"""Claiming jobs for work and giving them back: the short SQL transactions on both sides of a lease."""

from __future__ import annotations

import functools
import hashlib
import itertools
from collections import defaultdict
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import sqlalchemy as sa

from tuna.configs import parse_line
from tuna.db import sessions
from tuna.db.models import Config, FindDb, Job, Solver, StepResult, Trial
from tuna.db.types import utc_now
from tuna.libraries.base import Candidate, Cause, Library, Step, WorkItem
from tuna.libraries.registry import get_library
from tuna.pipeline.leases import new_id
from tuna.pipeline.states import CLAIMABLE, IN_FLIGHT, State, check, queued, waiting

_IN_FLIGHT = tuple(sorted(state.value for state in IN_FLIGHT))
#: Rows named in one IN list; SQLite allows 32,766 parameters in a statement.
IN_LIST = 5000


@dataclass(frozen=True)
class ClaimedChunk:
    """Work items that were claimed together and will travel together."""

    id: str
    items: tuple[WorkItem, ...]


@dataclass(frozen=True)
class Scope:
    """Whose work it is: a session of a library, and the target its compiler is told."""

    session_id: int
    library: Library
    target: str


#: One statement per chunk, by primary key; built once, because building costs more than running it.
_LEASE = (
    sa.update(Job)
    .where(Job.id.in_(sa.bindparam("ids", expanding=True)))
    .values(
        state=sa.bindparam("to"),
        attempt=Job.attempt + 1,
        chunk=sa.bindparam("by"),
        leased_at=sa.bindparam("now"),
        updated_at=sa.bindparam("now"),
    )
)


def claim(connection: sa.Connection, scope: Scope, step: Step, limit: int, size: int = 0) -> list[ClaimedChunk]:
    """Lease up to `limit` jobs that wait for `step`, in chunks of `size` (0: the step's own). The caller commits, then
    publishes."""
    rows = _waiting(connection, scope.session_id, step, limit)
    if not rows:
        return []
    now = utc_now()
    items = _items(connection, scope, step, rows)
    chunks: list[ClaimedChunk] = []
    alone = {row.id for row in rows if row.isolate}
    together = [(row.config_id, item) for row, item in zip(rows, items, strict=True) if row.id not in alone]
    groups = [*_groups(together, size or step.chunk), *([item] for item in items if item.job_id in alone)]
    for group in groups:
        chunk = ClaimedChunk(new_id(), tuple(group))
        ids = [item.job_id for item in group]
        connection.execute(_LEASE, {"ids": ids, "to": queued(step.resource).value, "by": chunk.id, "now": now})
        chunks.append(chunk)
    return chunks


def _groups(items: Iterable[tuple[int, WorkItem]], size: int) -> Iterator[list[WorkItem]]:
    """Items, with their config, in lists of at most `size`; a config's items stay together where they fit, for a library
    may do them at once."""
    group: list[WorkItem] = []
    for _, pairs in itertools.groupby(items, key=lambda pair: pair[0]):
        same = [item for _, item in pairs]
        if group and len(group) + len(same) > size:
            yield group
            group = []
        group += same
        while len(group) > size:
            yield group[:size]
            group = group[size:]
    if group:
        yield group


def _waiting(connection: sa.Connection, session_id: int, step: Step, limit: int) -> list[Any]:
    rows: list[Any] = []
    for state in CLAIMABLE[step.resource]:
        if len(rows) >= limit:
            break
        # Index ix_job_claim (session_id, step, state, id): a range in order, no sort. SQLite ignores FOR UPDATE.
        rows += connection.execute(
            sa.select(Job.id, Job.config_id, Job.solver_id, Job.steps, Job.options, Job.attempt, Job.isolate)
            .where(Job.session_id == session_id, Job.step == step.name, Job.state == state.value)
            .order_by(Job.id)
            .limit(limit - len(rows))
            .with_for_update(skip_locked=True)
        ).all()
    return rows


def _items(connection: sa.Connection, scope: Scope, step: Step, rows: Sequence[Any]) -> list[WorkItem]:
    configs = _configs(connection, {row.config_id for row in rows})
    named = sa.select(Solver.id, Solver.name).where(Solver.id.in_({row.solver_id for row in rows}))
    solvers: dict[int, str] = {row.id: row.name for row in connection.execute(named)}
    later = [row.id for row in rows if not row.steps.startswith(step.name)]
    candidates = _candidates(connection, later)
    known = _known_params(connection, scope.session_id, rows) if scope.library.uses_known_params else {}
    return [
        WorkItem(
            job_id=row.id,
            attempt=row.attempt + 1,
            session_id=scope.session_id,
            library=scope.library.name,
            step=step.name,
            solver=solvers[row.solver_id],
            config=configs[row.config_id][1],
            target=scope.target,
            seed=seed(configs[row.config_id][0], solvers[row.solver_id]),
            options=row.options,
            candidates=tuple(candidates.get(row.id, ())),
            known_params=known.get((row.config_id, row.solver_id)),
        )
        for row in rows
    ]


def seed(config_key: str, solver: str) -> int:
    """The seed of a job's proposals, 31 bits: the same layer and solver get the same candidates in every session."""
    return int.from_bytes(hashlib.sha256(f"{config_key}/{solver}".encode()).digest()[:4], "big") >> 1


def _configs(connection: sa.Connection, ids: Iterable[int]) -> dict[int, tuple[str, dict[str, Any]]]:
    found: dict[int, tuple[str, dict[str, Any]]] = {}
    for part in parts(sorted(ids)):
        for row in connection.execute(sa.select(Config.id, Config.key, Config.driver).where(Config.id.in_(part))):
            found[row.id] = (row.key, _config_json(row.driver))
    return found


@functools.lru_cache(maxsize=10_000)
def _config_json(driver: str) -> dict[str, Any]:
    return parse_line(driver)[0].to_json()


def _candidates(connection: sa.Connection, job_ids: Sequence[int]) -> dict[int, list[Candidate]]:
    found: dict[int, list[Candidate]] = defaultdict(list)
    for part in parts(job_ids):
        # Unique key (job_id, number): one range per job.
        for row in connection.execute(
            sa.select(Trial.job_id, Trial.number, Trial.artifact)
            .where(Trial.job_id.in_(part), Trial.artifact.is_not(None), Trial.cause.is_(None))
            .order_by(Trial.job_id, Trial.number)
        ):
            found[row.job_id].append(Candidate(index=row.number, artifact=row.artifact))
    return found


def _known_params(connection: sa.Connection, session_id: int, rows: Sequence[Any]) -> dict[tuple[int, int], str]:
    """By config and solver the params that the session holds for the best."""
    found: dict[tuple[int, int], str] = {}
    for part in parts(sorted({row.config_id for row in rows})):
        statement = sa.select(FindDb.config_id, FindDb.solver_id, FindDb.params).where(
            FindDb.session_id == session_id, FindDb.config_id.in_(part), FindDb.params != ""
        )
        found |= {(row.config_id, row.solver_id): row.params for row in connection.execute(statement)}
    return found


def libraries_of(connection: sa.Connection, session_ids: Iterable[int]) -> dict[int, Library]:
    """The library of each session: whoever drains or reaps meets the work of all sessions of the database."""
    return {key: get_library(name) for key, name in sessions.libraries(connection, session_ids).items()}


#: Index ix_job_claim by session, step and state: only jobs in flight are touched, whatever the size of the session.
ORPHANS = (
    sa.select(Job.chunk)
    .where(
        Job.session_id == sa.bindparam("session"),
        Job.step.in_(sa.bindparam("steps", expanding=True)),
        Job.state.in_(_IN_FLIGHT),
        Job.leased_at < sa.bindparam("before"),
    )
    .distinct()
)


def orphans(connection: sa.Connection, session_id: int, steps: Sequence[str], before: Any) -> list[str]:
    """Chunks that SQL holds to be in flight, in one of `steps`, since `before` or longer."""
    found = connection.execute(ORPHANS, {"session": session_id, "steps": list(steps), "before": before})
    return [chunk for chunk in found.scalars() if chunk is not None]


def wanted(connection: sa.Connection, chunks: Iterable[str]) -> set[str]:
    """Those of `chunks` that still hold a job which counts."""
    found: set[str | None] = set()
    for part in parts(sorted(chunks)):
        found |= set(connection.execute(sa.select(Job.chunk).where(Job.chunk.in_(part)).distinct()).scalars())
    return {chunk for chunk in found if chunk}


def release(connection: sa.Connection, chunks: Sequence[str], *, max_attempts: int, worker_lost: bool) -> int:
    """Give the unfinished jobs of `chunks` back; returns how many.

    When their worker was lost, its first unfinished job is charged an attempt, and all of them travel alone from now
    on, so that a job which kills its worker is soon found out and ends as errored.
    """
    released = 0
    for part in parts(chunks):
        rows = connection.execute(
            sa.select(
                Job.id,
                Job.session_id,
                Job.config_id,
                Job.solver_id,
                Job.options,
                Job.chunk,
                Job.state,
                Job.step,
                Job.steps,
                Job.attempt,
                Job.failures,
                Job.leased_at,
            )
            .where(Job.chunk.in_(part), Job.state.in_(_IN_FLIGHT))
            .order_by(Job.chunk, Job.id)
            .with_for_update()
        ).all()
        released += len(rows)
        charged: set[str] = set()
        libraries = libraries_of(connection, {row.session_id for row in rows})
        for row in rows:
            library = libraries[row.session_id]
            charge = worker_lost and row.chunk not in charged
            charged.add(row.chunk)
            failures = row.failures + 1 if charge else row.failures
            steps = tuple(row.steps.split(","))
            old = State(row.state)
            new = (
                State.ERRORED if failures >= max_attempts else waiting(row.step, steps, library.step(row.step).resource)
            )
            values: dict[str, Any] = {"state": check(old, new).value, "failures": failures, "chunk": None}
            values |= {"leased_at": None, "updated_at": utc_now()}
            if worker_lost:
                values |= {"isolate": True}
            if charge:
                values |= {"cause": Cause.WORKER_LOST.value}
                item = _items(connection, Scope(row.session_id, library, ""), library.step(row.step), [row])[0]
                connection.execute(sa.insert(StepResult).values(_lost(row, library.reproduce(item))))
            connection.execute(sa.update(Job).where(Job.id == row.id).values(values))
    return released


def _lost(row: Any, reproduce: str) -> dict[str, Any]:
    return {
        "job_id": row.id,
        "step": row.step,
        "attempt": row.attempt,
        "ok": False,
        "cause": Cause.WORKER_LOST.value,
        "output_tail": "The worker died or was silent for longer than its lease.",
        "reproduce": reproduce,
        "worker": "",
        "device": "",
        "started_at": row.leased_at,
        "ended_at": utc_now(),
        "busy_s": 0.0,
    }


def parts(values: Sequence[Any]) -> Iterable[Sequence[Any]]:
    """`values` in lists that one statement can name."""
    return (values[start : start + IN_LIST] for start in range(0, len(values), IN_LIST))
