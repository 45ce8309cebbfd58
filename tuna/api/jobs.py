"""Jobs: load, run, retry, cancel, reproduce."""

from __future__ import annotations

import contextlib
import os
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from tuna.api.sessions import session_library
from tuna.errors import BadInput, NotFound, ServiceError
from tuna.messages import choices

if TYPE_CHECKING:
    import sqlalchemy as sa

    from tuna.coordinator.session_run import Progress
    from tuna.libraries.base import Library
    from tuna.libraries.items import StepResult
    from tuna.settings import Settings
    from tuna.workers.launch import WorkerSpec

#: Layers that an error names one by one.
_MOST_NAMED = 20
#: Job options by name; which ones there are, the library says.
Options = Mapping[str, object]


@dataclass(frozen=True)
class LoadedJobs:
    """How many jobs are new, of how many applicable pairs of layer and solver in the session (and
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


def load_jobs(
    session_id: int,
    *,
    tag: str | None,
    steps: Sequence[str] = (),
    reason: str,
    solvers: Sequence[str] = (),
    options: Options | None = None,
    algorithm: str | None = None,
    only_dynamic: bool = False,
    only_tunable: bool = False,
    only_recurrent: bool = False,
    command: str | None = None,
    config_ids: Sequence[int] = (),
    **columns: object,
) -> LoadedJobs:
    """Add the missing jobs of a session, for every applicable solver or for `solvers`.

    `tag`: only its layers; `config_ids`: only these layers; `steps`: only these, in the library's
    order; `algorithm`: only solvers of this family; `only_recurrent`: only layers that were
    imported as ones to tune again with each release; `command`: only convolutions of this
    precision; `columns`: further columns of `job` that a user sets. Raises BadInput if no pair of
    layer and solver applies and for options that the library does not have, NotFound for an unknown
    session, tag, step or solver.
    """
    from tuna.db import jobs
    from tuna.db.database import open_database
    from tuna.db.engine import writing
    from tuna.libraries.options import check
    from tuna.libraries.registry import get_library
    from tuna.results.untried import without_solver
    from tuna.search import targets_met
    from tuna.vocabulary import State

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
        algorithm=algorithm,
        only_dynamic=only_dynamic,
        only_tunable=only_tunable,
        only_recurrent=only_recurrent,
        command=command,
        config_ids=config_ids,
    )
    with writing(engine) as connection:
        count = jobs.load(connection, request)
        pairs = jobs.pairs(connection, session_id, tag)
        without = without_solver(connection, session_id, tag)
        target_ms = checked.get("target_ms")
        met = targets_met.end(connection, session_id, target_ms) if target_ms else {}
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
    from tuna.configs import GemmConfig
    from tuna.db import configs, solvers
    from tuna.db.database import open_database
    from tuna.db.engine import writing
    from tuna.libraries.options import check
    from tuna.libraries.registry import get_library

    engine, tag, library = open_database(), "example", get_library("example")
    check(library.options, options, library.name)  # before anything is written
    with writing(engine) as connection:
        configs.store(connection, [GemmConfig(m=1, n=1, k=1)], tag)
        solvers.update_solvers(connection, library)
    solvers.update_applicability(engine, library, session_id, tag)
    return load_jobs(session_id, tag=tag, reason=reason, options=options)


def run(
    session_id: int | Sequence[int] | None,
    steps: Sequence[str] = (),
    *,
    processes: int | None = None,
    policy: str | None = None,
    on_progress: Callable[[Progress], None] | None = None,
    on_wait: Callable[[float, str], None] | None = None,
    on_behind: Callable[[Mapping[int, int]], None] | None = None,
    on_log: Callable[[Path], None] | None = None,
) -> Progress:
    """Run the steps (all when empty) of one session or several with workers on this machine;
    returns the final progress.

    `session_id`: None for all sessions that have open jobs, also those that get some meanwhile.
    `processes`: compile processes, by default one for each core that may build; `policy`: as
    `Settings.policy`, its default; raises BadInput for one that is for comparisons alone.
    `on_progress` is called a few times a second at most, `on_wait` when it ends before
    the jobs, with the seconds that workers have to finish what they do and the reason (empty: an
    interruption or an error), and `on_behind` when workers are busy with
    other sessions first, with the number of chunks of each. With `on_log` the log goes to a file in
    `TUNA_HOME`, unless the settings ask for more of it than warnings or for JSON; it is called at
    the end with the file, if there was anything to log. A second call resumes.
    """
    from tuna.coordinator.session_run import default_workers

    def workers(libraries: Collection[Library]) -> Sequence[WorkerSpec]:
        return default_workers(libraries, processes)

    return _work_through(
        session_id, steps, workers, on_progress, on_wait, on_behind, policy=policy, on_log=on_log
    )


def enqueue(
    session_id: int | Sequence[int] | None,
    steps: Sequence[str] = (),
    *,
    policy: str | None = None,
    on_progress: Callable[[Progress], None] | None = None,
    on_behind: Callable[[Mapping[int, int]], None] | None = None,
    on_stored: Callable[[Collection[int]], None] | None = None,
) -> Progress:
    """Fill the queues and drain results until every job is finished, as `run` does; the workers run
    elsewhere.

    `policy`: as `Settings.policy`, its default. `on_stored` gets the jobs of which results were
    just stored, of any session.
    """
    return _work_through(
        session_id, steps, lambda _: (), on_progress, None, on_behind, on_stored, policy
    )


def _work_through(
    session_id: int | Sequence[int] | None,
    steps: Sequence[str],
    workers: Callable[[Collection[Library]], Sequence[WorkerSpec]],
    on_progress: Callable[[Progress], None] | None,
    on_wait: Callable[[float, str], None] | None,
    on_behind: Callable[[Mapping[int, int]], None] | None,
    on_stored: Callable[[Collection[int]], None] | None = None,
    policy: str | None = None,
    on_log: Callable[[Path], None] | None = None,
) -> Progress:
    from tuna.coordinator.session_run import RunEvents, run_sessions
    from tuna.db.database import open_database
    from tuna.settings import get_settings
    from tuna.vocabulary import COMPARED_POLICIES, PUBLISHING_POLICIES

    settings = get_settings()
    if policy is not None:
        if policy not in PUBLISHING_POLICIES:
            hint = (
                f"`tuna simulate --policy {policy}` compares with it"
                if policy in COMPARED_POLICIES
                else ""
            )
            raise BadInput(
                f"No coordinator publishes by {policy!r}.",
                hint=hint or choices(policy, PUBLISHING_POLICIES, "policies"),
            )
        settings = settings.model_copy(update={"policy": policy})
    engine = open_database()
    with _log_kept(settings, on_log):
        found = run_sessions(
            engine,
            settings,
            [session_id] if isinstance(session_id, int) else session_id,
            steps=steps,
            workers=workers,
            events=RunEvents(
                on_progress or (lambda _: None),
                on_wait or (lambda *_: None),
                on_behind or (lambda _: None),
                on_stored or (lambda _: None),
            ),
        )
    empty = [key for key, state in sorted(found.sessions.items()) if not state.total]
    if empty:
        raise BadInput(
            f"Session {empty[0]} has no jobs.",
            hint=f"load some: `tuna load-jobs --session-id {empty[0]}`",
        )
    return found


@contextlib.contextmanager
def _log_kept(settings: Settings, on_log: Callable[[Path], None] | None) -> Iterator[None]:
    """Send the log to a file, as `run` says."""
    from tuna import logs

    if on_log is None or settings.log_format == "json" or settings.log_level in ("DEBUG", "INFO"):
        yield
        return
    path = settings.home / "logs" / f"coordinator-{os.getpid()}.log"
    try:
        with logs.into_file(path, settings.log_level, settings.log_format):
            yield
    finally:
        if path.exists():
            on_log(path)


def retry(session_id: int, *, jobs: Sequence[int] = (), cause: str | None = None) -> dict[str, int]:
    """Send errored jobs back to the step that failed, as if it had never been tried; returns how
    many by step."""
    from tuna.coordinator import actions as job_actions
    from tuna.db.database import open_database
    from tuna.libraries.registry import get_library

    library = get_library(session_library(session_id))
    return job_actions.retry(
        open_database(), library, job_actions.JobSelection(session_id, jobs, cause=cause)
    )


def cancel(session_id: int, *, jobs: Sequence[int] = (), tag: str | None = None) -> CanceledJobs:
    """Cancel jobs that are not finished; results of their current attempts are refused."""
    from tuna.coordinator import actions as job_actions
    from tuna.db.database import open_database
    from tuna.libraries.registry import get_library

    engine, library = open_database(), get_library(session_library(session_id))
    done = job_actions.cancel(engine, library, job_actions.JobSelection(session_id, jobs, tag=tag))
    return CanceledJobs(done.states, drop_leases(engine, done.chunks))


def drop_leases(engine: sa.Engine, chunks: set[str]) -> bool:
    """Drop the leases, so that workers stop; False without Redis."""
    if not chunks:
        return True
    from tuna.db import sessions
    from tuna.db.engine import reading
    from tuna.queue.connection import connect
    from tuna.queue.leases import Leases
    from tuna.settings import get_settings

    with reading(engine) as connection:
        namespace = sessions.namespace(connection)
    try:
        Leases(connect(get_settings()), namespace, get_settings().lease_s).drop(sorted(chunks))
    except ServiceError:
        return False
    return True


def reproduce(
    driver: str,
    *,
    library: str,
    solver: str,
    step: str,
    seed: int = 0,
    index: int | None = None,
    options: Options | None = None,
    conditions: Mapping[str, str] | None = None,
    target: str | None = None,
) -> list[StepResult]:
    """Repeat a job of the layer `driver`, or the candidate `index` of it, here and now; nothing is
    stored.

    Runs the steps up to `step` and returns their results, of which the last one has the outcome.
    `target`: the session's; default: this machine's. Raises NotFound for an unknown solver,
    BadInput unless the layer is one.
    """
    from tuna.configs import read_one
    from tuna.libraries.conditions import chosen
    from tuna.libraries.items import WorkItem
    from tuna.libraries.options import check
    from tuna.libraries.registry import get_library
    from tuna.workers.local_run import run_steps

    tuned = get_library(library)
    if solver not in [known.name for known in tuned.solvers()]:
        raise NotFound(
            f"{library} has no solver {solver!r}.",
            hint=choices(solver, (one.name for one in tuned.solvers()), "solvers"),
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
        target=tuned.environment().target if target is None else target,
        conditions=chosen(tuned.conditions, conditions or {}, library),
        seed=seed,
        options=check(tuned.options, options or {}, library),
    )
    return run_steps(tuned, item, step, index, _body(item.body))


def reproduce_trial(trial: int) -> tuple[list[StepResult], str]:
    """Build the candidate of this trial (its id in the database) from its params, and measure it if
    the trial was measured.

    It is done here and now, and nothing is stored. Returns the results of the steps, of which the
    last one has the outcome, and the layer's driver line. Raises NotFound for an unknown trial,
    BadInput if its library builds nothing from params.
    """
    from tuna.db.database import open_database
    from tuna.db.engine import reading
    from tuna.queue.reproduction import trial_item
    from tuna.workers.local_run import run_steps

    with reading(open_database()) as connection:
        library, item = trial_item(connection, trial)
    (candidate,) = item.candidates
    return run_steps(library, item, item.step, candidate.index, _body(item.body)), item.layer.text()


def _body(digest: str | None) -> bytes | None:
    """The body of a layer that has one, from the database."""
    if digest is None:
        return None
    from tuna.db import configs
    from tuna.db.database import open_database
    from tuna.db.engine import reading

    with reading(open_database()) as connection:
        return configs.body(connection, digest)
