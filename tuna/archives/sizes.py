"""Sessions with their state, counts and sizes in the database."""

from __future__ import annotations

from dataclasses import dataclass
from datetime import datetime
from typing import Any

import sqlalchemy as sa

from tuna.db import known_sessions, overview, searches
from tuna.db.engine import reading
from tuna.db.searches import Searches
from tuna.db.session_options import SessionOptions
from tuna.db.types import UtcDateTime, plain_table
from tuna.errors import TunaError
from tuna.jobs.states import is_open
from tuna.results.core_tables import environment, find_db, find_db_kernel, golden, golden_entry, job
from tuna.vocabulary import IN_FLIGHT, SEARCH, State

_session = plain_table(
    "session", "id environment_id uuid reason", options=sa.JSON(), created_at=UtcDateTime()
)
_trial = plain_table("trial", "job_id step params output_tail times_ms")
_kernel = plain_table("kernel", "digest size_bytes")
#: States of a session by precedence: its state is the first that one of its jobs has
_STATES = ("running", "waiting", "ended")
#: Bytes of a trial besides its texts: numbers, ids and keys
_TRIAL_BYTES = 200


@dataclass(frozen=True)
class SessionSize:
    """A session with counts and sizes of its rows."""

    id: int
    uuid: str
    library: str
    reason: str
    arch: str
    environment: str  #: key of the environment
    created_at: datetime
    state: str  #: state of the session: running, waiting, ended, or empty
    jobs: dict[str, int]  #: number of jobs by state, without those that search in rounds
    searches: Searches
    trials: int
    trial_bytes: int  #: estimated bytes of the trials
    results: int
    artifacts: int  #: number of artifacts in the database, for its results
    artifact_bytes: int
    golden: tuple[int, ...]  #: golden versions with results of the session
    options: SessionOptions


def read(engine: sa.Engine, session_id: int | None = None) -> list[SessionSize]:
    """All sessions by id, or one; raises NotFound. It reads every trial."""
    with reading(engine) as connection:
        if session_id is not None:
            known_sessions.require(connection, session_id)
        query = (
            sa.select(_session, environment.c.library, environment.c.arch, environment.c.key)
            .join(environment, environment.c.id == _session.c.environment_id)
            .order_by(_session.c.id)
        )
        found = connection.execute(
            query if session_id is None else query.where(_session.c.id == session_id)
        ).all()
        return [_size(connection, row) for row in found]


def _size(connection: sa.Connection, row: Any) -> SessionSize:
    counts: dict[str, int] = {}
    states: set[str] = set()
    for (state, step), number in overview.jobs_by_state(connection, row.id).items():
        counts[state] = counts.get(state, 0) + number
        if State(state) in IN_FLIGHT:
            states.add("running")
        else:
            states.add("waiting" if _waits(row.library, state, step) else "ended")
    of_rounds = searches.read(connection, [row.id]).get(row.id, Searches())
    texts = sum(
        (
            sa.func.coalesce(sa.func.length(column), 0)
            for column in (_trial.c.params, _trial.c.output_tail, _trial.c.times_ms)
        ),
        sa.literal(_TRIAL_BYTES),
    )
    # candidates that a search has only proposed are no trials yet
    tried = sa.func.count(sa.case((_trial.c.step != SEARCH, 1)))
    of_trials = sa.select(tried, sa.func.sum(texts)).join(job, job.c.id == _trial.c.job_id)
    trials, trial_bytes = connection.execute(
        of_trials.select_from(_trial).where(job.c.session_id == row.id)
    ).one()
    of_session = find_db.c.session_id == row.id
    results = connection.execute(sa.select(sa.func.count()).where(of_session)).scalar_one()
    code = sa.select(find_db_kernel.c.kernel).join(
        find_db, find_db.c.id == find_db_kernel.c.find_db_id
    )
    texts_of = sa.select(find_db.c.workload).where(of_session, find_db.c.workload.is_not(None))
    used = sa.union(code.where(of_session), texts_of).subquery()
    artifacts, artifact_bytes = connection.execute(
        sa.select(sa.func.count(), sa.func.sum(_kernel.c.size_bytes)).where(
            _kernel.c.digest.in_(used.select())
        )
    ).one()
    has_entry = sa.exists().where(
        golden_entry.c.golden_id == golden.c.id, golden_entry.c.session_id == row.id
    )
    versions = sa.select(golden.c.version).where(has_entry).order_by(golden.c.version)
    return SessionSize(
        id=row.id,
        uuid=row.uuid,
        library=row.library,
        reason=row.reason,
        arch=row.arch,
        environment=row.key,
        created_at=row.created_at,
        state=next(
            (state for state in _STATES if state in states), "ended" if results else "empty"
        ),
        jobs=searches.others(counts, of_rounds),
        searches=of_rounds,
        trials=trials,
        trial_bytes=int(trial_bytes or 0),
        results=results,
        artifacts=artifacts,
        artifact_bytes=int(artifact_bytes or 0),
        golden=tuple(connection.execute(versions).scalars()),
        options=SessionOptions.stored(row.options),
    )


def _waits(library: str, state: str, step: str) -> bool:
    """Whether a job in `state` waits for `step`; `compiled` is final if no device step follows."""
    # the library is not loaded for the other states, since that takes long
    if state != State.COMPILED.value:
        return state in (State.NEW.value, State.SEARCHING.value)
    from tuna.libraries.registry import get_library
    from tuna.libraries.steps import find_step

    try:
        return is_open(state, find_step(get_library(library), step).resource)
    except TunaError:  # the library is not installed here, or has no such step any more
        return True
