"""Runs a session from one process: enqueues, drains and, on request, starts local workers, until all jobs are done."""

from __future__ import annotations

import contextlib
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import sqlalchemy as sa

from tuna.db import jobs, sessions
from tuna.db.engine import reading, writing
from tuna.libraries.base import Library
from tuna.libraries.registry import get_library
from tuna.pipeline import finals
from tuna.pipeline.connection import connect, ensure_services, make_celery
from tuna.pipeline.coordinator import Coordinator, SessionWork
from tuna.pipeline.states import is_open
from tuna.sandbox.cores import compile_cpus
from tuna.settings import Settings
from tuna.vocabulary import Resource, State
from tuna.workers.launch import LocalWorkers, WorkerSpec, local_workers

_COUNT_EVERY_S = 0.5
#: Counting a million jobs takes a second, so it is limited to this share of the time, or to the second one when
#: there is nothing else to do.
_COUNT_SHARE, _IDLE_COUNT_SHARE = 0.05, 0.2


@dataclass(frozen=True)
class Progress:
    """Numbers of jobs of a session, by state and by what is left to do."""

    states: dict[str, int]
    total: int
    unfinished: int  #: still have a step that is being enqueued
    errored: int

    @property
    def wanted(self) -> int:
        """Jobs that are to be done: all but the canceled ones."""
        return self.total - self.states.get(State.CANCELED.value, 0)

    @property
    def finished(self) -> int:
        """Jobs that were done here."""
        return self.wanted - self.unfinished


def progress(connection: sa.Connection, library: Library, session_id: int, steps: Sequence[str]) -> Progress:
    """Progress of the session in `steps` (all when empty)."""
    states: dict[str, int] = {}
    unfinished = 0
    served = {step.name for step in library.served_with(steps)}
    for (job_steps, state, step), count in jobs.by_steps(connection, session_id).items():
        states[state] = states.get(state, 0) + count
        order = jobs.step_names(job_steps)
        if is_open(state, library.step(step).resource) and not served.isdisjoint(order[order.index(step) :]):
            unfinished += count
    return Progress(states, sum(states.values()), unfinished, states.get(State.ERRORED.value, 0))


def run_session(
    engine: sa.Engine,
    settings: Settings,
    session_id: int,
    *,
    steps: Sequence[str] = (),
    workers: Sequence[WorkerSpec] = (),
    on_progress: Callable[[Progress], None] = lambda _: None,
    on_wait: Callable[[float], None] = lambda _: None,
) -> Progress:
    """Enqueue and drain `steps` (all when empty) of the session until every job has finished them.

    `on_wait` is called with the seconds that interrupted workers have to finish what they do.
    """
    with reading(engine) as connection:
        info = sessions.get(connection, session_id)
        namespace = sessions.namespace(connection)
        library = get_library(info.environment.library)
        for step in steps:
            library.step(step)
    if library.finals in library.served_with(steps):
        with writing(engine) as connection:  # the last run may have ended before it could
            finals.load(connection, session_id, library)
    with reading(engine) as connection:
        state = progress(connection, library, session_id, steps)
    on_progress(state)
    if not state.unfinished:
        return state
    ensure_services(settings)
    work = SessionWork(session_id, namespace, info.environment, library)
    coordinator = Coordinator(engine, connect(settings), make_celery(settings), settings, work, steps)
    watch = _Watch(engine, library, session_id, steps, on_progress)
    with contextlib.ExitStack() as stack:
        if workers:
            stack.push(lambda *end: _keep_what_is_done(coordinator) if end[0] else None)
            watch.workers = stack.enter_context(
                local_workers(settings.home / "logs", workers, settings.shutdown_s, on_wait)
            )
        coordinator.run(watch.tick, watch.finished)
    return watch.now()


def _keep_what_is_done(coordinator: Coordinator) -> None:
    """Drain what interrupted workers finished or returned; the next run would, but users look at the status before."""
    with contextlib.suppress(Exception):  # another exception is already being raised to the user
        while coordinator.drain.once():
            pass


class _Watch:
    """Periodically counts the session's jobs, reports progress, and detects workers that ended."""

    def __init__(
        self,
        engine: sa.Engine,
        library: Library,
        session_id: int,
        steps: Sequence[str],
        on_progress: Callable[[Progress], None],
    ) -> None:
        self._engine = engine
        self._library = library
        self._session_id = session_id
        self._steps = steps
        self._on_progress = on_progress
        self._counted_at = 0.0
        self._count_s = 0.0
        self.workers: LocalWorkers | None = None

    def now(self) -> Progress:
        started_at = time.monotonic()
        with reading(self._engine) as connection:
            state = progress(connection, self._library, self._session_id, self._steps)
        self._counted_at = time.monotonic()
        self._count_s = self._counted_at - started_at
        self._on_progress(state)
        return state

    def tick(self) -> None:
        if self.workers is not None:
            self.workers.check()
        if time.monotonic() - self._counted_at >= max(_COUNT_EVERY_S, self._count_s / _COUNT_SHARE):
            self.now()

    def finished(self) -> bool:
        if time.monotonic() - self._counted_at < self._count_s / _IDLE_COUNT_SHARE:
            return False
        return not self.now().unfinished


def default_workers(library: Library, compile_processes: int | None = None) -> list[WorkerSpec]:
    """One process per compile core, one worker for the device."""
    resources = {step.resource for step in library.steps}
    specs = []
    if Resource.CPU in resources:
        specs.append(WorkerSpec("compile", compile_processes or len(compile_cpus())))
    if Resource.DEVICE in resources:
        specs.append(WorkerSpec("eval", 1))
    return specs
