"""Work through sessions: with workers on this machine, or with those elsewhere."""

from __future__ import annotations

import contextlib
import os
import threading
from collections.abc import Callable, Collection, Iterator, Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path

from tuna.common import logs
from tuna.common.messages import choices
from tuna.coordinator import session_run
from tuna.coordinator.session_run import Progress, RunEvents, default_workers, run_sessions
from tuna.db.database import open_database
from tuna.errors import BadInput
from tuna.exports.trial_log import TrialLog, trial_log
from tuna.libraries.base import Library
from tuna.libraries.registry import get_library
from tuna.settings import Settings, get_settings
from tuna.vocabulary import COMPARED_POLICIES, PUBLISHING_POLICIES
from tuna.workers.launch import LastingWorkers, WorkerSpec

_SILENT = RunEvents()


def run(
    session_id: int | Sequence[int] | None,
    steps: Sequence[str] = (),
    *,
    workers: bool | LastingWorkers = True,
    processes: int | None = None,
    policy: str | None = None,
    on_progress: Callable[[Progress], None] | None = None,
    events: RunEvents = _SILENT,
) -> Progress:
    """Run the steps (all when empty) of one session or several with workers on this machine;
    returns the final progress.

    `session_id`: None for all sessions that have open jobs, also those that get some meanwhile.
    `workers`: False: they run elsewhere, as of `enqueue`; or such that several runs share.
    `processes`: compile processes, by default one for each core that may build; `policy`: as
    `Settings.policy`, its default; raises BadInput for one that is for comparisons alone.
    `on_progress` is called a few times a second at most. Where `events` have `on_log`, the log goes
    to a file in `TUNA_HOME`, unless the settings ask for more of it than warnings or for JSON. A
    second call resumes.
    """
    if on_progress is not None:
        events = replace(events, on_progress=on_progress)
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
    fixed = session_id is not None  # no session of another library joins them
    engine = open_database()
    with _log_kept(settings, events.on_log if workers else None):
        progress = run_sessions(
            engine,
            settings,
            [session_id] if isinstance(session_id, int) else session_id,
            steps=steps,
            workers=partial(default_workers, compile_processes=processes, alone=fixed)
            if workers
            else _nobody,
            lasting=workers if isinstance(workers, LastingWorkers) else None,
            events=events,
        )
    if session_id is None:
        return progress
    empty = [key for key, state in sorted(progress.sessions.items()) if not state.total]
    if empty:
        raise BadInput(
            f"Session {empty[0]} has no jobs.",
            hint=f"load some: `tuna load-jobs --session-id {empty[0]}`",
        )
    return progress


def enqueue(
    session_id: int | Sequence[int] | None,
    steps: Sequence[str] = (),
    *,
    policy: str | None = None,
    on_progress: Callable[[Progress], None] | None = None,
    events: RunEvents = _SILENT,
    stop: threading.Event | None = None,
) -> Progress:
    """Fill the queues and drain results until every job is finished, as `run` does; the workers run
    elsewhere.

    `policy`: as `Settings.policy`, its default. `stop`: for all sessions (None) alone: go on until
    it is set, whether there are jobs or not, also through outages of servers and changes of
    sessions; raises SchemaError after an upgrade of the database.
    """
    if stop is not None and session_id is not None:
        raise BadInput("A coordinator that stays serves all sessions.")
    events = replace(events, stop=stop)
    return run(
        session_id, steps, workers=False, policy=policy, on_progress=on_progress, events=events
    )


def start_workers(library: str, workers: LastingWorkers, events: RunEvents = _SILENT) -> None:
    """Start the workers that runs of sessions of the library will share, so that they get ready
    before the first one; the database need not be there yet."""
    session_run.start_workers(get_settings(), get_library(library), workers, events)


def _nobody(_: Collection[Library]) -> Sequence[WorkerSpec]:
    """No workers of this machine."""
    return ()


def log_trials(url: str, folder: str = "") -> TrialLog:
    """Log all trials at a URL in parts, or in a folder there with a file for each layer and solver,
    within a `with` block around `run`, `enqueue` or `tune_model`, whose events' `on_stored` is its
    `add`; raises ServiceError for a URL that cannot be used."""
    open_database()  # as it ought to be, for the process that reads it
    return trial_log(url, get_settings().home, folder)


@contextlib.contextmanager
def _log_kept(settings: Settings, on_log: Callable[[Path], None] | None) -> Iterator[None]:
    """Send the log to a file, as `run` says."""
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
