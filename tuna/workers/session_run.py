"""Runs sessions from one process: enqueues, drains and, on request, starts local workers, until all jobs are done."""

from __future__ import annotations

import contextlib
import time
from collections import Counter
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, field

import sqlalchemy as sa

from tuna.db import jobs, sessions
from tuna.db.engine import reading
from tuna.errors import TunaError
from tuna.libraries.base import Library
from tuna.libraries.registry import get_library
from tuna.pipeline import followers, rounds
from tuna.pipeline.aside import Aside
from tuna.pipeline.connection import connect, ensure_services, make_celery
from tuna.pipeline.coordinator import Coordinator
from tuna.pipeline.serving import SessionWork, read_works
from tuna.pipeline.states import is_open
from tuna.sandbox.cores import build_cpus, compile_cpus
from tuna.settings import Settings
from tuna.vocabulary import Resource, State
from tuna.workers.launch import LocalWorkers, WorkerSpec, local_workers

_COUNT_EVERY_S = 0.5
#: Counting a million jobs takes a second, so it is limited to this share of the time, or to the second one when
#: there is nothing else to do.
_COUNT_SHARE, _IDLE_COUNT_SHARE = 0.05, 0.2
#: Seconds without progress after which it is asked whose work the workers do.
_STILL_S = 5.0


@dataclass(frozen=True)
class Progress:
    """Numbers of jobs of sessions, by state and by what is left to do."""

    states: dict[str, int]
    total: int
    unfinished: int  #: still have a step that is being enqueued
    errored: int
    sessions: Mapping[int, Progress] = field(default_factory=dict)  #: of several sessions: the progress of each

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
    if library.search is not None and library.search.name in served:
        unfinished = max(unfinished, rounds.going_on(connection, session_id, library.search.name))
    return Progress(states, sum(states.values()), unfinished, states.get(State.ERRORED.value, 0))


def total(parts: Mapping[int, Progress]) -> Progress:
    """The sum of the progress of sessions."""
    states: Counter[str] = Counter()
    for part in parts.values():
        states.update(part.states)
    whole, unfinished, errored = (
        sum(getattr(part, name) for part in parts.values()) for name in ("total", "unfinished", "errored")
    )
    return Progress(dict(states), whole, unfinished, errored, dict(parts))


def run_sessions(
    engine: sa.Engine,
    settings: Settings,
    session_ids: Collection[int] | None,
    *,
    steps: Sequence[str] = (),
    workers: Callable[[Collection[Library]], Sequence[WorkerSpec]] = lambda _: (),
    on_progress: Callable[[Progress], None] = lambda _: None,
    on_wait: Callable[[float], None] = lambda _: None,
    on_behind: Callable[[Mapping[int, int]], None] = lambda _: None,
    on_stored: Callable[[Collection[int]], None] = lambda _: None,
) -> Progress:
    """Enqueue and drain `steps` (all when empty) of the sessions until every job has finished them.

    `session_ids`: None for all sessions of the database with open jobs, also those that get some meanwhile. `workers` says
    which ones to start here for the libraries of the sessions. `on_wait` is called with the seconds that interrupted workers
    have to finish what they do, `on_behind` with the number of chunks of each other session that workers do before those of
    these sessions, `on_stored` with the jobs of which results were stored (`Drain`).
    """
    with reading(engine) as connection:
        works = read_works(connection, session_ids, steps)
        for session_id in sorted(set(session_ids or ()) - {work.session_id for work in works}):
            library = sessions.get(connection, session_id).environment.library
            get_library(library)  # raises, since it is not installed here
    for name in steps:
        if session_ids is not None and not any(name in {step.name for step in work.steps} for work in works):
            works[0].library.step(name)
    aside = Aside(engine)
    for work in works:
        with aside.guard(work):
            followers.load(engine, work)  # the last run may have ended before it could
    watch = _Watch(engine, works, session_ids, steps, on_progress, aside)
    state = watch.now()
    if not state.unfinished:
        if aside.faults:
            raise TunaError(f"No session could be served: {next(iter(aside.faults.values()))}.")
        return state
    ensure_services(settings)
    celery = make_celery(settings)
    coordinator = Coordinator(engine, connect(settings), celery, settings, works, watch.refresh, aside, on_stored)
    with contextlib.ExitStack() as stack:
        specs = workers([work.library for work in works])
        if specs:
            stack.push(lambda *end: _keep_what_is_done(coordinator) if end[0] else None)
            watch.workers = stack.enter_context(
                local_workers(settings.home / "logs", specs, settings.shutdown_s, on_wait)
            )
        coordinator.run(lambda: watch.tick(coordinator.ahead, on_behind), watch.finished)
    return watch.now()


def _keep_what_is_done(coordinator: Coordinator) -> None:
    """Drain what interrupted workers finished or returned; the next run would, but users look at the status before."""
    with contextlib.suppress(Exception):  # another exception is already being raised to the user
        while coordinator.drain.once():
            pass


class _Watch:
    """Periodically counts the sessions' jobs, reports progress, and detects workers that ended."""

    def __init__(
        self,
        engine: sa.Engine,
        works: Sequence[SessionWork],
        session_ids: Collection[int] | None,
        steps: Sequence[str],
        on_progress: Callable[[Progress], None],
        aside: Aside,
    ) -> None:
        self._engine = engine
        self._aside = aside
        self._works = {work.session_id: work for work in works}
        self._session_ids = session_ids
        self._steps = steps
        self._on_progress = on_progress
        self._counted_at = 0.0
        self._count_s = 0.0
        self._moved_at = time.monotonic()
        self._behind: Mapping[int, int] = {}
        self.counts: dict[int, Progress] = {}
        self.workers: LocalWorkers | None = None

    def refresh(self) -> Sequence[SessionWork]:
        """The sessions that are to be served now, with their priorities."""
        with reading(self._engine) as connection:
            works = read_works(connection, self._session_ids, self._steps, self._works)
        self._works |= {work.session_id: work for work in works}
        return works

    def now(self) -> Progress:
        started_at = time.monotonic()
        before = total(self.counts)
        with reading(self._engine) as connection:
            for work in self._works.values():
                with self._aside.guard(work):
                    served = [step.name for step in work.steps]
                    if served:
                        self.counts[work.session_id] = progress(connection, work.library, work.session_id, served)
        state = total(self.counts)
        self._counted_at = time.monotonic()
        self._count_s = self._counted_at - started_at
        if state.unfinished != before.unfinished:
            self._moved_at = self._counted_at
        self._on_progress(state)
        return state

    def tick(self, ahead: Callable[[], Mapping[int, int]], on_behind: Callable[[Mapping[int, int]], None]) -> None:
        if self.workers is not None:
            self.workers.check()
        if time.monotonic() - self._counted_at >= max(_COUNT_EVERY_S, self._count_s / _COUNT_SHARE):
            self.now()
            if self._counted_at - self._moved_at >= _STILL_S:
                self._moved_at = self._counted_at
                behind = ahead()
                if behind and behind.keys() != self._behind.keys():
                    on_behind(behind)
                self._behind = behind

    def finished(self) -> bool:
        if time.monotonic() - self._counted_at < self._count_s / _IDLE_COUNT_SHARE:
            return False
        return not self.now().unfinished


def default_workers(libraries: Collection[Library], compile_processes: int | None = None) -> list[WorkerSpec]:
    """One worker for the device, and a process for each core that compiles; more where builds borrow those that measure."""
    resources = {step.resource for library in libraries for step in library.steps}
    specs = []
    if Resource.CPU in resources:
        borrows = any(library.borrows_cores for library in libraries)
        specs.append(WorkerSpec("compile", compile_processes or len(build_cpus() if borrows else compile_cpus())))
    if Resource.DEVICE in resources:
        specs.append(WorkerSpec("eval", 1))
    return specs
