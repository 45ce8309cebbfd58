"""Runs sessions from one process: enqueues, drains and, on request, starts local workers, until all
jobs are done."""

from __future__ import annotations

import contextlib
import functools
import sys
import threading
import traceback
from collections import Counter
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path

import sqlalchemy as sa
import structlog
from sqlalchemy.exc import DBAPIError

from tuna.common import waits
from tuna.common.clocks import Throttle
from tuna.common.lifetime import ALONE, LIBRARIES
from tuna.coordinator.coordinator import Coordinator
from tuna.coordinator.publisher import Backends
from tuna.coordinator.quarantine import Quarantine
from tuna.db import database, jobs, searches, server_errors, sessions
from tuna.db.engine import reading
from tuna.db.searches import Searches
from tuna.errors import NotFound, ServiceError, TunaError
from tuna.jobs import finals, rounds
from tuna.jobs.serving import SessionWork, lately_worked, read_works
from tuna.jobs.states import is_open
from tuna.libraries.base import Library
from tuna.libraries.registry import get_library
from tuna.libraries.steps import find_step, served_steps
from tuna.queue.connection import connect, ensure_services, make_celery
from tuna.sandbox.cores import build_cpus, compile_cpus
from tuna.settings import Settings
from tuna.vocabulary import END_STATES, SEARCH, Resource, State
from tuna.workers.launch import LastingWorkers, LocalWorkers, WorkerSpec, local_workers

log = structlog.get_logger(__name__)

_COUNT_EVERY_S = 0.5
#: Maximum share of the time for counting jobs, and the share when there is nothing else to do:
#: counting a million jobs takes a second
_COUNT_SHARE, _IDLE_COUNT_SHARE = 0.05, 0.2
#: Seconds without progress after which the run looks for other work that the workers do
_STILL_S = 5.0


@dataclass(frozen=True)
class Progress:
    """Numbers of jobs of sessions, by state and by what is left to do. A search is one, whatever
    its rounds."""

    states: dict[str, int]  #: number of jobs by state, without those that search
    total: int
    unfinished: int  #: number of jobs that still have a step to run
    errored: int  #: number of failed jobs and failed rounds of searches
    rounds: dict[str, int] = field(default_factory=dict)  #: number of rounds of searches by state
    searching: int = 0  #: number of searches among the unfinished jobs
    to_come: int | None = 0  #: number of rounds that the searches may still open; None: unlimited
    #: progress of each session, where this is a sum of several
    sessions: Mapping[int, Progress] = field(default_factory=dict)

    @property
    def wanted(self) -> int:
        """Jobs that are to be done: all but the canceled ones."""
        return self.total - self.states.get(State.CANCELED.value, 0)

    @property
    def finished(self) -> int:
        """Jobs that were done here."""
        return self.wanted - self.unfinished

    @property
    def done(self) -> int:
        """As `finished`, with rounds in place of searches, which go on for long."""
        jobs_done = (
            sum(self.states.values())
            - self.states.get(State.CANCELED.value, 0)
            - self.unfinished
            + self.searching
        )
        return jobs_done + self._rounds_ended

    @property
    def left(self) -> int | None:
        """Jobs and rounds that are not done; None: not known."""
        if self.to_come is None:
            return None
        rounds_open = sum(self.rounds.values()) - self._rounds_ended
        return self.unfinished - self.searching + rounds_open + self.to_come

    @property
    def _rounds_ended(self) -> int:
        return sum(count for state, count in self.rounds.items() if State(state) in END_STATES)


def progress(
    connection: sa.Connection,
    library: Library,
    session_id: int,
    steps: Sequence[str],
    tag: str | None = None,
) -> Progress:
    """Progress of the session in `steps` (all when empty); with `tag` that of jobs and searches
    whose layers carry it."""
    states: Counter[str] = Counter()
    of_searches = searches.read(connection, [session_id], tag).get(session_id, Searches())
    unfinished = open_rounds = 0
    served = {step.name for step in served_steps(library, steps)}
    for (job_steps, state, step), count in jobs.by_steps(connection, session_id, tag).items():
        order = jobs.step_names(job_steps)
        is_round = order[0] == SEARCH
        if not is_round:
            states[state] += count
        if is_open(state, find_step(library, step).resource) and not served.isdisjoint(
            order[order.index(step) :]
        ):
            open_rounds += count if is_round else 0
            unfinished += 0 if is_round else count
    searching = 0
    to_come: int | None = 0
    if number := of_searches.total:
        # Where the step `search` is served elsewhere, a search has to do here what is open of it
        # now.
        searching = (
            rounds.unfinished(connection, session_id, library, tag).searches
            if SEARCH in served
            else min(open_rounds, number)
        )
        rules = library.search if SEARCH in served else None
        by_solver = rounds.to_come(connection, session_id, rules, tag) if rules else {}
        to_come = None if by_solver is None else sum(by_solver.values())
    errored = states[State.ERRORED.value] + of_searches.rounds.get(State.ERRORED.value, 0)
    total_ = sum(states.values()) + number
    return Progress(
        dict(states),
        total_,
        unfinished + searching,
        errored,
        dict(of_searches.rounds),
        searching,
        to_come,
    )


def total(parts: Mapping[int, Progress]) -> Progress:
    """The sum of the progress of sessions."""
    states: Counter[str] = Counter()
    of_rounds: Counter[str] = Counter()
    for part in parts.values():
        states.update(part.states)
        of_rounds.update(part.rounds)
    whole, unfinished, errored, searching = (
        sum(getattr(part, name) for part in parts.values())
        for name in ("total", "unfinished", "errored", "searching")
    )
    to_come = [part.to_come for part in parts.values()]
    known = None if None in to_come else sum(filter(None, to_come))
    return Progress(
        dict(states), whole, unfinished, errored, dict(of_rounds), searching, known, dict(parts)
    )


@dataclass(frozen=True)
class RunEvents:
    """Callbacks of a run, and what ends it."""

    on_progress: Callable[[Progress], None] = lambda _: None
    #: called with (seconds, reason) while local workers shut down before the sessions are done
    on_wait: Callable[[float, str], None] = lambda *_: None
    #: called with what the sessions wait for, such as "an eval worker", when it changes; "" once
    #: they go on. It must not raise
    on_waiting: Callable[[str], None] = lambda _: None
    #: called with the ids of the jobs whose results were stored (`Drain`)
    on_stored: Callable[[Collection[int]], None] = lambda _: None
    #: called with a session whose jobs have all ended, and its progress, where the coordinator
    #: stays
    on_ended: Callable[[int, Progress], None] = lambda *_: None
    #: called at the end of a run with workers here, with the file of its log if anything was
    #: logged; None: the log goes where the process has it
    on_log: Callable[[Path], None] | None = None
    #: set to end the run, which otherwise goes on without jobs; None: it ends with its jobs
    stop: threading.Event | None = None


def run_sessions(
    engine: sa.Engine,
    settings: Settings,
    session_ids: Collection[int] | None,
    *,
    steps: Sequence[str] = (),
    workers: Callable[[Collection[Library]], Sequence[WorkerSpec]] = lambda _: (),
    lasting: LastingWorkers | None = None,
    events: RunEvents | None = None,
) -> Progress:
    """Enqueue and drain `steps` (all when empty) of the sessions until every job has finished them.

    `session_ids`: None for all sessions of the database with open jobs, also those that get some
    meanwhile. `workers` says which ones to start here for the libraries of the sessions; they end
    with the run, or are `lasting` ones. Raises NotFound at the end for one of `session_ids` that
    was deleted meanwhile.
    """
    events = events or RunEvents()
    stop = events.stop
    quarantine = Quarantine(engine)
    _load_followers(engine, session_ids, steps, quarantine)
    with reading(engine) as connection:
        works = read_works(connection, session_ids, steps)
        for session_id in sorted(set(session_ids or ()) - {work.session_id for work in works}):
            library = sessions.get(connection, session_id).environment.library
            get_library(library)  # raises, since it is not installed here
    for name in steps:
        if session_ids is not None and not any(
            name in {step.name for step in work.steps} for work in works
        ):
            find_step(works[0].library, name)
    watch = _Watch(engine, works, session_ids, steps, events, quarantine)
    state = watch.now()
    if not state.unfinished and stop is None:
        if quarantine.faults:
            fault = next(iter(quarantine.faults.values()))
            raise TunaError(f"No session could be served: {fault}.")
        return state
    ensure_services(settings)
    specs = workers([work.library for work in works])
    coordinator = Coordinator(
        Backends(engine, connect(settings), make_celery(settings), settings),
        works,
        refresh=watch.refresh,
        quarantine=quarantine,
        on_stored=events.on_stored,
        fixed_workers=bool(specs),
    )
    with contextlib.ExitStack() as stack:
        if specs:
            ends = functools.partial(_settle, coordinator)
            start = settings.home / "logs", specs, settings.shutdown_s, events.on_wait
            if lasting is None:
                stack.callback(ends)
                watch.workers = stack.enter_context(local_workers(*start))
            else:
                watch.workers = lasting.start(*start)
                lasting.on_end = ends
                stack.push(lasting.ended)
        with _in_a_sentence(engine), waits.shown_by(watch.wait):
            coordinator.run(lambda: watch.tick(coordinator.waited_for), watch.finished, stop)
        if watch.workers and total(watch.counts).wanted < state.wanted:
            watch.workers.idle = False  # they may still be at jobs that were canceled or deleted
    if stop is not None:
        return total(watch.counts)
    ended = watch.now()
    for session_id, before in state.sessions.items() if session_ids else ():
        if before.total and not ended.sessions[session_id].total:
            raise NotFound(
                f"Session {session_id} was deleted while it ran.",
                hint="the others: `tuna session list`",
            )
    return ended


def start_workers(
    settings: Settings, library: Library, lasting: LastingWorkers, events: RunEvents
) -> None:
    """Start the workers that later runs of the library's sessions share, so that they get ready
    meanwhile."""
    ensure_services(settings)
    specs = default_workers([library], alone=True)
    lasting.start(settings.home / "logs", specs, settings.shutdown_s, events.on_wait)


def _load_followers(
    engine: sa.Engine,
    session_ids: Collection[int] | None,
    steps: Sequence[str],
    quarantine: Quarantine,
) -> None:
    """Make the jobs that follow others, which the last run may have ended before it could."""
    with reading(engine) as connection:
        works = read_works(connection, session_ids, steps)
        if session_ids is None:  # it may have no open jobs because of that
            lately = lately_worked(connection) - {work.session_id for work in works}
            works += read_works(connection, sorted(lately), steps)
    for work in works:
        with quarantine.guard(work):
            finals.load_followers(engine, work)


@contextlib.contextmanager
def _in_a_sentence(engine: sa.Engine) -> Iterator[None]:
    """Raise ServiceError in place of the error of a server that was unreachable for longer than the
    coordinator waits, and SchemaError in place of what an upgrade of the schema causes."""
    try:
        yield
    except TunaError:
        raise
    except Exception as error:
        if not server_errors.is_passing(error):
            if isinstance(error, DBAPIError):
                database.check_not_upgraded(engine)
            raise
        sentence = (
            f"Redis or the broker could not be used for ten minutes: {server_errors.words(error)}"
        )
        raise ServiceError(
            sentence, hint="the same command goes on from there; see `tuna doctor`"
        ) from error


def _settle(coordinator: Coordinator) -> None:
    """Leave nothing in flight when the workers of a run have ended; the next run would, but users
    look at the status before, and an embedded Redis may end with the workers."""
    if error := sys.exc_info()[1]:  # it may hold a transaction that it came from the middle of
        traceback.clear_frames(error.__traceback__)
    try:
        coordinator.settle()
    except Exception as error:  # the run is over, or raises another exception
        log.warning("jobs left in flight for the next run", reason=server_errors.words(error))


class _Watch:
    """Periodically counts the sessions' jobs, reports progress, and detects workers that ended."""

    def __init__(
        self,
        engine: sa.Engine,
        works: Sequence[SessionWork],
        session_ids: Collection[int] | None,
        steps: Sequence[str],
        events: RunEvents,
        quarantine: Quarantine,
    ) -> None:
        self._engine = engine
        self._quarantine = quarantine
        self._works = {work.session_id: work for work in works}
        self._open = dict(self._works)
        self._session_ids = session_ids
        self._steps = steps
        self._events = events
        self._stays = events.stop is not None
        self._counts = Throttle(_COUNT_EVERY_S, _COUNT_SHARE)
        self._idle_counts = Throttle(share=_IDLE_COUNT_SHARE)
        self._still = Throttle()
        self._still.wait(_STILL_S)
        self._waited_for = ""
        self.counts: dict[int, Progress] = {}
        self.workers: LocalWorkers | None = None

    def refresh(self) -> Sequence[SessionWork]:
        """The sessions that are to be served now, with their priorities."""
        with reading(self._engine) as connection:
            works = read_works(connection, self._session_ids, self._steps, self._works)
        found = {work.session_id: work for work in works}
        for session_id in self._open.keys() - found.keys():
            # Its last results may have been stored since its followers were looked for.
            work = self._open[session_id]
            with self._quarantine.guard(work):
                if finals.load_followers(self._engine, work):
                    found[session_id] = work
                elif self._stays:
                    self._forget(work)
        self._open = found
        self._works |= found
        return list(found.values())

    def _forget(self, work: SessionWork) -> None:
        """Count the session for the last time: one that stays counts those with open jobs alone."""
        with reading(self._engine) as connection:
            served = [step.name for step in work.steps]
            last = progress(connection, work.library, work.session_id, served)
        self._works.pop(work.session_id, None)
        self.counts.pop(work.session_id, None)
        if last.total:  # else it was deleted
            self._events.on_ended(work.session_id, last)

    def now(self) -> Progress:
        before = total(self.counts)
        with (
            self._counts.running(),
            self._idle_counts.running(),
            reading(self._engine) as connection,
        ):
            for work in self._works.values():
                with self._quarantine.guard(work):
                    served = [step.name for step in work.steps]
                    if served:
                        self.counts[work.session_id] = progress(
                            connection, work.library, work.session_id, served
                        )
        state = total(self.counts)
        if state.unfinished != before.unfinished:
            self._still.wait(_STILL_S)
            self.wait("")
        self._events.on_progress(state)
        return state

    def wait(self, what: str) -> None:
        """Note what is waited for; "" for nothing."""
        if what != self._waited_for:
            self._waited_for = what
            self._events.on_waiting(what)

    def tick(self, waited_for: Callable[[], str]) -> None:
        if self.workers is not None:
            self.workers.check()
        if self._counts.is_due:
            self.now()
            if self._still.is_due:
                self._still.wait(_STILL_S)
                self.wait(waited_for())

    def finished(self) -> bool:
        return not self._stays and self._idle_counts.is_due and not self.now().unfinished


def default_workers(
    libraries: Collection[Library], compile_processes: int | None = None, *, alone: bool = False
) -> list[WorkerSpec]:
    """One worker for the device, and a process for each core that compiles; more where builds
    borrow those that measure. `alone`: they serve these libraries alone."""
    known = {LIBRARIES: ",".join(sorted(library.name for library in libraries))}
    known |= {ALONE: "1"} if alone else {}
    resources = {step.resource for library in libraries for step in library.steps}
    specs = []
    if Resource.CPU in resources:
        borrows = any(library.device.borrows_cores for library in libraries)
        processes = compile_processes or len(build_cpus() if borrows else compile_cpus())
        specs.append(WorkerSpec("compile", processes, env=known))
    if Resource.DEVICE in resources:
        specs.append(WorkerSpec("eval", 1, env=known))
    return specs
