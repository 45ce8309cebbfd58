"""Jobs: load, retry, cancel, repeat."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

import sqlalchemy as sa

from tuna.api.services import artifact_store, namespace
from tuna.common.messages import choices
from tuna.configs import GemmConfig, read_one
from tuna.coordinator import actions as job_actions
from tuna.db import configs, jobs, sessions, solvers
from tuna.db.database import open_database
from tuna.db.engine import reading, writing
from tuna.db.jobs import Only
from tuna.errors import BadInput, NotFound, ServiceError
from tuna.jobs import finals
from tuna.jobs.serving import read_works
from tuna.libraries.items import StepResult, WorkItem
from tuna.libraries.options import check, chosen
from tuna.libraries.registry import get_library
from tuna.libraries.steps import find_step
from tuna.queue.connection import connect
from tuna.queue.leases import Leases
from tuna.queue.reproduction import trial_item
from tuna.results.untried import without_solver
from tuna.settings import get_settings
from tuna.vocabulary import SEARCH, State
from tuna.workers.local_run import run_steps

#: Maximum of layers that an error names one by one
_MAX_NAMED = 20
#: Job options by name; the library says which there are
Options = Mapping[str, object]


@dataclass(frozen=True)
class LoadedJobs:
    """Numbers of new jobs, and of applicable pairs of layer and solver in the session (and
    tag)."""

    added: int
    pairs: int
    #: known result, as text, of each layer whose target it meets, so that the layer needs no trial
    met: tuple[str, ...] = ()


@dataclass(frozen=True)
class CanceledJobs:
    """Numbers of canceled jobs by the state that they had."""

    states: Mapping[str, int]
    #: true if the workers were told; false: Redis is unreachable, so they first finish their chunks
    workers_told: bool


@dataclass(frozen=True)
class JobOrigin:
    """The facts about a job that is repeated which its session had."""

    seed: int = 0
    conditions: Mapping[str, str] = field(default_factory=dict)
    target: str | None = None  #: target of the compiler; None: this machine's


_ALL, _HERE = Only(), JobOrigin()


def session_library(session_id: int, expected: str | None = None) -> str:
    """The library of the session; raises NotFound, or BadInput when another one was expected."""
    with reading(open_database()) as connection:
        name = sessions.get(connection, session_id).environment.library
    if expected is not None and name != expected:
        raise BadInput(f"Session {session_id} belongs to {name}, not to {expected}.")
    return name


def check_device(session_id: int, arch: str | None, num_cu: int | None) -> None:
    """Raise BadInput for a device that is not the session's, should one be named."""
    with reading(open_database()) as connection:
        there = sessions.get(connection, session_id).environment
    if arch not in (None, there.arch) or num_cu not in (None, there.num_cu):
        raise BadInput(
            f"Session {session_id} is for {there.arch} with {there.num_cu} compute units."
        )


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
    wanted = {find_step(library, name).name for name in steps}
    names = [step.name for step in library.steps if not wanted or step.name in wanted]
    if wanted - set(names):
        raise BadInput(
            "Tuna decides by itself which jobs search, and when there are finals.",
            hint="leave this step out",
        )
    checked = check(library.options, options or {}, library.name)
    rules = library.search if names == [step.name for step in library.steps] else None
    searched = rules.solvers([item.name for item in library.solvers()], checked) if rules else ()
    request = jobs.JobRequest(
        session_id,
        library.name,
        names,
        reason,
        State.NEW.value,
        tag=tag,
        solvers=tuple(solvers),
        searched=tuple(searched),
        search=SEARCH if library.search else "",
        options=checked,
        columns=columns,
        only=only,
    )
    with writing(engine) as connection:
        count = jobs.load(connection, request)
        pairs = jobs.pairs(connection, session_id, tag)
        without = without_solver(connection, session_id, tag)
        target_ms = checked.get("target_ms")
        met = job_actions.end_met(connection, session_id, target_ms) if target_ms else {}
    if not pairs and without:
        raise nothing_to_tune(library.name, [(layer.layer, layer.reason) for layer in without])
    if not pairs:
        hint = f"run: `tuna applicability --session-id {session_id}`"
        raise BadInput(
            f"No solver is known to run these layers in session {session_id}.", hint=hint
        )
    return LoadedJobs(count, pairs, tuple(met.values()))


def nothing_to_tune(library: str, layers: Sequence[tuple[str, str]]) -> BadInput:
    """Return the error for layers, each with the reason, of which none has a solver."""
    shown = [f"{layer}: {reason}" for layer, reason in layers[:_MAX_NAMED]]
    more = [f"and {len(layers) - _MAX_NAMED} more"] if len(layers) > _MAX_NAMED else []
    return BadInput(
        f"{library} has a solver for none of these layers.", hint="\n  ".join([*shown, *more])
    )


def load_followers(session_id: int) -> int:
    """Make the jobs of a session that follow others which got on, rounds of searches and finals, as
    its coordinator does; return how many. Raises NotFound."""
    engine = open_database()
    with reading(engine) as connection:
        (work,) = read_works(connection, [session_id])
    return finals.load_followers(engine, work)


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
    settings = get_settings()
    try:
        Leases(connect(settings), namespace(engine), settings.lease_s).drop(sorted(chunks))
    except ServiceError:
        return False
    return True


def reproduce(
    driver: str,
    *,
    library: str,
    solver: str,
    step: str,
    options: Options | None = None,
    index: int | None = None,
    origin: JobOrigin = _HERE,
) -> list[StepResult]:
    """Repeat a job of the layer `driver`, or the candidate `index` of it, here and now; nothing is
    stored.

    Runs the steps up to `step` and returns their results, of which the last one has the outcome.
    Raises NotFound for an unknown solver, BadInput unless the layer is one.
    """
    tuned = get_library(library)
    if solver not in [known.name for known in tuned.solvers()]:
        raise NotFound(
            f"{library} has no solver {solver!r}.",
            hint=choices(solver, (entry.name for entry in tuned.solvers()), "solvers"),
        )
    layer = read_one(driver)
    item = WorkItem(
        job_id=1,
        attempt=1,
        session_id=0,
        library=library,
        step=step,
        solver=solver,
        config=layer.to_json(),
        body=layer.body_digest,
        data=layer.data_digests,
        target=tuned.environment().target if origin.target is None else origin.target,
        conditions=chosen(tuned.conditions, origin.conditions, library),
        seed=origin.seed,
        options=check(tuned.options, options or {}, library),
    )
    return run_steps(tuned, item, step, index, _given(item))


def reproduce_trial(trial: int) -> tuple[list[StepResult], str]:
    """Build the candidate of this trial (its id in the database) from its params, and measure it if
    the trial was measured.

    It is done here and now, and nothing is stored. Returns the results of the steps, of which the
    last one has the outcome, and the layer's driver line. Raises NotFound for an unknown trial,
    BadInput if its library builds nothing from params.
    """
    with reading(open_database()) as connection:
        library, item = trial_item(connection, trial)
    (candidate,) = item.candidates
    return run_steps(library, item, item.step, candidate.index, _given(item)), item.layer.text()


def _given(item: WorkItem) -> list[bytes]:
    """The artifacts that a config names: its body from the database, its data from the store.
    Raises NotFound for one that is gone."""
    engine, found = open_database(), list[bytes]()
    if item.body is not None:
        with reading(engine) as connection:
            found.append(configs.body(connection, item.body))
    for digest in item.data:
        try:
            found.append(artifact_store(engine).get(digest))
        except KeyError:
            raise NotFound(
                f"The artifact {digest} of {item.layer.label} is not in the store any more.",
                hint="build the model again",
            ) from None
    return found
