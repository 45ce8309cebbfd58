"""Jobs: load, run, retry, cancel, reproduce."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import sqlalchemy as sa

from tuna.api.sessions import session_library
from tuna.configs import GemmConfig
from tuna.coordinator import actions as job_actions
from tuna.db import configs, jobs, sessions, solvers
from tuna.db.database import open_database
from tuna.db.engine import reading, writing
from tuna.errors import BadInput, ServiceError
from tuna.libraries.options import check
from tuna.libraries.registry import get_library
from tuna.queue.connection import connect
from tuna.queue.leases import Leases
from tuna.results.untried import without_solver
from tuna.settings import get_settings
from tuna.vocabulary import State

#: Layers that an error names one by one.
_MOST_NAMED = 20
#: Job options by name; which ones there are, the library says.
Options = Mapping[str, object]


@dataclass(frozen=True)
class LoadedJobs:
    """Numbers of new jobs, and of applicable pairs of layer and solver in the session (and
    tag)."""

    added: int
    pairs: int
    #: of each layer whose target a known result meets, so that it needs no trial, which
    met: tuple[str, ...] = ()


@dataclass(frozen=True)
class CanceledJobs:
    """Numbers of canceled jobs by the state that they had."""

    states: Mapping[str, int]
    workers_told: bool  #: False: Redis is unreachable, so workers first finish their chunks


@dataclass(frozen=True)
class Only:
    """The solvers and layers that jobs are loaded for, beside those that `load_jobs` names."""

    algorithm: str | None = None  #: solvers of this family, such as GEMM
    dynamic: bool = False  #: dynamic solvers
    tunable: bool = False  #: tunable solvers
    recurrent: bool = False  #: layers imported as ones to tune again with each release
    command: str | None = None  #: convolutions of this precision: conv, convfp16, convbfp16
    config_ids: Sequence[int] = ()  #: these layers


_ALL = Only()


def load_jobs(
    session_id: int,
    *,
    tag: str | None,
    reason: str,
    steps: Sequence[str] = (),
    solvers: Sequence[str] = (),
    options: Options | None = None,
    only: Only = _ALL,
    **columns: object,
) -> LoadedJobs:
    """Add the missing jobs of a session, for every applicable solver or for `solvers`.

    `tag`: only its layers; `steps`: only these, in the library's order; `columns`: further columns
    of `job` that a user sets. Raises BadInput if no pair of layer and solver applies and for
    options that the library does not have, NotFound for an unknown session, tag, step or solver.
    """
    engine = open_database()
    library = get_library(session_library(session_id))
    wanted = {library.step(name).name for name in steps}
    names = [step.name for step in library.steps if not wanted or step.name in wanted]
    if wanted - set(names):
        raise BadInput(
            "Tuna decides by itself which jobs search, and when there are finals.",
            hint="leave this step out",
        )
    checked = check(library.options, options or {}, library.name)
    whole = library.search is not None and names == [step.name for step in library.steps]
    searched = library.searched([one.name for one in library.solvers()], checked) if whole else ()
    request = jobs.JobRequest(
        session_id,
        library.name,
        names,
        reason,
        State.NEW.value,
        tag=tag,
        solvers=tuple(solvers),
        searched=tuple(searched),
        search=library.search.name if library.search else "",
        options=checked,
        columns=columns,
        algorithm=only.algorithm,
        only_dynamic=only.dynamic,
        only_tunable=only.tunable,
        only_recurrent=only.recurrent,
        command=only.command,
        config_ids=only.config_ids,
    )
    with writing(engine) as connection:
        count = jobs.load(connection, request)
        pairs = jobs.pairs(connection, session_id, tag)
        without = without_solver(connection, session_id, tag)
        target_ms = checked.get("target_ms")
        met = job_actions.end_met(connection, session_id, target_ms) if target_ms else {}
    if not pairs and without:
        raise nothing_to_tune(library.name, [(one.layer, one.reason) for one in without])
    if not pairs:
        hint = f"run: `tuna applicability --session-id {session_id}`"
        raise BadInput(
            f"No solver is known to run these layers in session {session_id}.", hint=hint
        )
    return LoadedJobs(count, pairs, tuple(met.values()))


def nothing_to_tune(library: str, layers: Sequence[tuple[str, str]]) -> BadInput:
    """Return the error for layers, each with the reason, of which none has a solver."""
    shown = [f"{layer}: {reason}" for layer, reason in layers[:_MOST_NAMED]]
    more = [f"and {len(layers) - _MOST_NAMED} more"] if len(layers) > _MOST_NAMED else []
    return BadInput(
        f"{library} has a solver for none of these layers.", hint="\n  ".join([*shown, *more])
    )


def load_example_job(session_id: int, reason: str, options: Options) -> LoadedJobs:
    """A job of the example library, which runs a program and needs no imported layer."""
    engine, tag, library = open_database(), "example", get_library("example")
    check(library.options, options, library.name)  # before anything is written
    with writing(engine) as connection:
        configs.store(connection, [GemmConfig(m=1, n=1, k=1)], tag)
        solvers.update_solvers(connection, library)
    solvers.update_applicability(engine, library, session_id, tag)
    return load_jobs(session_id, tag=tag, reason=reason, options=options)


def retry(session_id: int, *, jobs: Sequence[int] = (), cause: str | None = None) -> dict[str, int]:
    """Send errored jobs back to the step that failed, as if it had never been tried; returns how
    many by step."""
    library = get_library(session_library(session_id))
    return job_actions.retry(
        open_database(), library, job_actions.JobSelection(session_id, jobs, cause=cause)
    )


def cancel(session_id: int, *, jobs: Sequence[int] = (), tag: str | None = None) -> CanceledJobs:
    """Cancel jobs that are not finished; results of their current attempts are refused."""
    engine, library = open_database(), get_library(session_library(session_id))
    done = job_actions.cancel(engine, library, job_actions.JobSelection(session_id, jobs, tag=tag))
    return CanceledJobs(done.states, drop_leases(engine, done.chunks))


def drop_leases(engine: sa.Engine, chunks: set[str]) -> bool:
    """Drop the leases, so that workers stop; False without Redis."""
    if not chunks:
        return True
    with reading(engine) as connection:
        namespace = sessions.namespace(connection)
    try:
        Leases(connect(get_settings()), namespace, get_settings().lease_s).drop(sorted(chunks))
    except ServiceError:
        return False
    return True
