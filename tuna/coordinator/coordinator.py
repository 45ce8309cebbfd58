"""The coordinator: fills the queues, drains results, and reclaims the jobs of lost workers.

It holds no state that matters. Kill it and start it again, or run several: SQL says what is to be
done.
"""

from __future__ import annotations

import contextlib
import contextvars
import gc
import os
import socket
import threading
import time
from collections import deque
from collections.abc import Callable, Collection, Sequence
from concurrent import futures
from pathlib import Path

import stamina
import structlog
from stamina import instrumentation

from tuna.artifacts.signatures import Keys
from tuna.artifacts.store import Artifacts, store_url
from tuna.common import signals, waits
from tuna.common.clocks import RateLimit, Throttle
from tuna.coordinator import key_rotation
from tuna.coordinator.chores import Chore, Chores
from tuna.coordinator.drain import Drain
from tuna.coordinator.pace import EndedStage, Pace
from tuna.coordinator.policies import POLICIES, Policy
from tuna.coordinator.publisher import Backends, Publisher
from tuna.coordinator.quarantine import Quarantine
from tuna.coordinator.reaper import Reaper
from tuna.coordinator.snapshots import Snapshots
from tuna.coordinator.waited_for import first_done, waited_for
from tuna.db import database, server_errors, sessions
from tuna.db.engine import reading, transaction
from tuna.jobs import finals, needed_artifacts, rounds
from tuna.jobs.serving import SessionWork, chunks_before, open_queues
from tuna.jobs.states import AttemptedJob
from tuna.libraries.items import StepResult
from tuna.queue.announcements import NAMESPACES_KEY, OPEN_S, announce_open, store_name
from tuna.queue.heartbeat import HeartbeatBoard
from tuna.queue.leases import Leases
from tuna.queue.results import ResultStream
from tuna.services import redis_client
from tuna.vocabulary import OUTAGE_S

log = structlog.get_logger(__name__)

#: Name of the file in `TUNA_HOME` that a lasting coordinator touches while it runs
ALIVE = "coordinator.alive"
#: Milliseconds that an idle round waits for results: while sessions are served, and while none is
_IDLE_MS, _UNSERVED_MS = 200, 500
#: Seconds between two rounds of claiming, publishing and draining on average, so that results
#: gather: a transaction costs the same for one as for a thousand; and number of rounds that may
#: follow each other at once after a quiet time, so that what ends then is followed up without a
#: pause
_ROUND_S, _BURST = 0.1, 10
#: Number of new objects at which the garbage collector runs: more than a batch has, because looking
#: through all of Tuna for each batch was a third of the CPU time
_GC_THRESHOLD = 100_000
#: Maximum of ended stages that are kept until a policy predicts by them
_MAX_ENDED = 5000
#: Seconds between two touches of ALIVE; age in seconds at which it counts as stale
_ALIVE_S, _GONE_S = 5.0, 20.0


def is_alive(home: Path) -> bool:
    """Return whether a coordinator that stays is at work for this TUNA_HOME."""
    try:
        return time.time() - (home / ALIVE).stat().st_mtime < _GONE_S
    except FileNotFoundError:
        return False


def _log_first(details: instrumentation.RetryDetails) -> None:
    """Log and tell the first retry alone, in the place of stamina's line for each."""
    if details.retry_num == 1:
        reason = server_errors.words(details.caused_by)
        log.warning("waiting for a server", reason=reason)
        waits.tell(f"{server_errors.server(details.caused_by)} ({reason})")


class Coordinator:
    """Runs the jobs of some sessions, or some of their steps."""

    def __init__(
        self,
        backends: Backends,
        works: Sequence[SessionWork],
        *,
        refresh: Callable[[], Sequence[SessionWork]] | None = None,
        quarantine: Quarantine | None = None,
        on_stored: Callable[[Collection[int]], None] = lambda _: None,
        policy: Policy | None = None,
        fixed_workers: bool = False,
    ) -> None:
        """`works`: the sessions to serve at first; `refresh` says which they are by now.
        `on_stored` is the drain's; `policy`: what is published next, by default what the setting
        says; `fixed_workers`: no autoscaler starts more workers where many chunks wait, so fewer do
        where they are long, or none (`Pace.queued_per_process`)."""
        self._engine = engine = backends.engine
        self._client = client = backends.redis
        self._settings = settings = backends.settings
        self._works = works
        self._refresh = refresh
        with reading(engine) as connection:
            self._namespace = namespace = sessions.namespace(connection)
        self._leases = Leases(client, namespace, settings.lease_s)
        consumer = f"{socket.gethostname()}-{os.getpid()}"
        self._stream = ResultStream(client, self._leases.results_key, consumer)
        self._artifacts = artifacts = Artifacts.from_settings(
            settings, namespace, self._read_keys(), self._read_keys, waits=False
        )
        artifacts.prepare()
        self._board = board = HeartbeatBoard(client, namespace, settings.lease_s)
        self.pace = Pace()
        self._ended: deque[EndedStage] = deque(maxlen=_MAX_ENDED)
        self.drain = Drain(
            engine,
            self._stream,
            artifacts,
            settings.max_attempts,
            board.is_alone,
            on_stored,
            self._note_result,
        )
        self.quarantine = quarantine or Quarantine(engine)
        self.snapshots = Snapshots(
            engine,
            board,
            self.quarantine,
            self._ended,
            settings.queue_bound,
            policy or POLICIES.get(settings.policy),
        )
        self.publisher = Publisher(
            backends,
            artifacts,
            self._leases,
            self.pace,
            self.quarantine,
            self.snapshots,
            fixed_workers=fixed_workers,
        )
        self.reaper = Reaper(
            engine,
            backends.celery,
            self._leases,
            self.quarantine,
            self._drain_all,
            settings.max_attempts,
        )
        self._has_published_bootstrap = False
        self._rounds = RateLimit(_ROUND_S, _BURST)
        self._alive_path = settings.home / ALIVE
        self._alive = Throttle(_ALIVE_S)
        self._drainer: futures.Executor | None = None
        self.chores = Chores(
            (
                Chore("check the schema", 1.0, lambda: database.require(engine, embedded=False)),
                Chore("read the sessions to serve", 0.5, self._read_works),
                Chore("note the time of searches", rounds.NOTE_EVERY_S, self._note_served),
                Chore("open rounds of searches", 2.0, self._open_rounds, share=0.05),
                Chore("publish the bootstrap", 1.0, self._publish_bootstrap),
                Chore("keep needed artifacts", needed_artifacts.KEEP_EVERY_S, self._keep_artifacts),
                Chore("take over reports of dead drains", 1.0, self.drain.take_over),
                Chore("drain dead letters", 1.0, self.drain.take_letters),
                Chore("announce open queues", OPEN_S / 4, self._announce_open, share=0.02),
                # Untaken chunks only use memory of Redis, and looking each up in SQL costs.
                Chore("sweep unwanted leases", 30.0, self.reaper.sweep),
                Chore("reclaim lost jobs", 1.0, lambda: self.reaper.reclaim(self._works)),
            )
        )

    def run(
        self,
        tick: Callable[[], None],
        finished: Callable[[], bool],
        stop: threading.Event | None = None,
    ) -> None:
        """Work until `finished()`, which is polled when idle, is True; `tick` is called in each
        round.

        With `stop` it stays: it ends after the round in which that is set, waits for servers
        without a limit, and touches `ALIVE` in `TUNA_HOME`, also while it waits.
        """
        going = True
        with contextlib.ExitStack() as stack:
            if len(self._works) == 1 and stop is None:
                stack.enter_context(
                    structlog.contextvars.bound_contextvars(session=self._works[0].session_id)
                )
            stack.callback(gc.set_threshold, *gc.get_threshold())
            gc.set_threshold(_GC_THRESHOLD)
            stack.callback(instrumentation.set_on_retry_hooks, instrumentation.get_on_retry_hooks())
            instrumentation.set_on_retry_hooks([_log_first])
            if self._engine.dialect.name != "sqlite":  # which has one writer at a time
                # While a server works on one transaction, we prepare the other.
                self._drainer = stack.enter_context(futures.ThreadPoolExecutor(1, "drain"))
                stack.callback(setattr, self, "_drainer", None)
            while going:
                for attempt in stamina.retry_context(
                    server_errors.is_passing,
                    attempts=None,
                    timeout=OUTAGE_S if stop is None else None,
                    wait_max=2.0,
                ):
                    with attempt:
                        if stop is not None:
                            self._show_alive()
                            if stop.is_set():
                                return
                        if attempt.num > 1:  # nor could workers renew their leases meanwhile
                            self.reaper.patience.wait(self._settings.lease_s / 2)
                        with signals.held():
                            going = self._round(tick, finished)
                if attempt.num > 1:
                    log.warning("servers work again")
                    waits.tell("")

    def settle(self) -> None:
        """Drain what workers that have ended finished, returned or abandoned, and take back what
        they have not begun."""
        self.drain.finish()
        self.reaper.withdraw(self._works)

    def _show_alive(self) -> None:
        if self._alive.is_due:
            with self._alive.running():
                self._alive_path.touch()

    def _round(self, tick: Callable[[], None], finished: Callable[[], bool]) -> bool:
        """One round; False when nothing was left to do. It is idempotent, so an error in the middle
        only costs a repeat."""
        moved = self.chores.run_due()
        if self._drainer is None:
            moved += self.drain.once()
        moved += self._load(self.drain.take_moved)
        self.publisher.expect(self.drain.take_due())
        moved += self._publish_and_drain()
        tick()
        if moved:
            self._rounds.wait()
        elif finished() and not self._stream.backlog() and not self._load():
            return False
        else:
            self.drain.once(block_ms=_IDLE_MS if self._works else _UNSERVED_MS)
        return True

    def _publish_and_drain(self) -> int:
        if self._drainer is None:
            return self.publish()
        drained = self._drainer.submit(contextvars.copy_context().run, self.drain.once)
        try:
            published = self.publish()
        finally:
            futures.wait([drained])
        return published + drained.result()

    def publish(self) -> int:
        """Claim and publish as much as the queues may hold; returns the number of chunks."""
        # not when it is constructed: Redis may take no writes then
        if not self._has_published_bootstrap:
            self._stream.open()  # before there are results: a full Redis makes no group
            self._publish_bootstrap()
        works = self.quarantine.others(self._works)
        self.snapshots.refresh(works)
        return self.publisher.publish(works)

    def _note_result(self, job: AttemptedJob, result: StepResult) -> None:
        """Remember how long a result took that the drain has written."""
        self.pace.note(job.session_id, result)
        if result.ok:
            took_s = result.ended_at - result.started_at
            self._ended.append(EndedStage(job.session_id, job.solver_id, result.step, took_s))

    def _load(self, configs: Callable[[int], Collection[int]] | None = None) -> int:
        """Make the jobs that follow others, of all configs or of those that `configs` says of a
        session; returns how many."""
        loaded = 0
        for work in self.quarantine.others(self._works):
            with self.quarantine.guard(work):
                found = finals.load_followers(
                    self._engine, work, None if configs is None else configs(work.session_id)
                )
                loaded += self._expect_followers(work, found)
        return loaded

    def _expect_followers(self, work: SessionWork, number: int) -> int:
        """Note that rounds or finals were made, which wait for their first step; returns how
        many."""
        if number:
            first = (work.library.search, work.library.finals)
            self.publisher.expect((work.session_id, part.step.name) for part in first if part)
        return number

    def _read_works(self) -> None:
        if self._refresh is not None:
            self._works = self._refresh()
            self.drain.forget_others({work.session_id for work in self._works})

    def _note_served(self) -> None:
        works = self.quarantine.others(self._works)
        searching = [work.session_id for work in works if work.library.search is not None]
        if searching:
            transaction(self._engine, rounds.note_served, searching)

    def _open_rounds(self) -> int:
        """Open rounds that are due because of what another coordinator drained, or a worker that
        was lost; end late searches."""
        opened, late = 0, set[str]()
        for work in self.quarantine.others(self._works):
            if work.library.search is None:
                continue
            with self.quarantine.guard(work):
                of_work = (work.session_id, work.library)
                late |= transaction(self._engine, rounds.give_up, *of_work)
                found = transaction(self._engine, rounds.load, *of_work)
                opened += self._expect_followers(work, found)
        if late:
            self._leases.drop(sorted(late))
        return opened

    def _announce_open(self) -> None:
        """Tell workers that leave when there is nothing to do what is still to come."""
        queues: set[str] = set()
        with reading(self._engine) as connection:
            for work in self.quarantine.others(self._works):
                with self.quarantine.guard(work):
                    queues |= open_queues(connection, work)
        with redis_client.skip_if_full():
            announce_open(self._client, self._namespace, sorted(queues))

    def _keep_artifacts(self) -> None:
        needed_artifacts.keep(self._engine, self._artifacts)

    def waited_for(self) -> str:
        """Return what the sessions wait for, as in a sentence; "" if workers are at work on
        them."""
        chunks, works = set(self._leases.all()), self.quarantine.others(self._works)
        with reading(self._engine) as connection:
            before = chunks_before(connection, chunks, self._leases.untaken(), works)
        found = (
            self.publisher.lacks,
            first_done(before),
            waited_for(works, self._board.live(), self._leases.published()),
        )
        return next(filter(None, found), "")

    def _publish_bootstrap(self) -> None:
        """Publish namespace, key and store URL; repeated because Redis may have been flushed, or
        full the last time."""
        with redis_client.skip_if_full():
            self._client.sadd(NAMESPACES_KEY, self._namespace)
            self._artifacts.keys = key_rotation.announce(
                self._engine, self._client, self._settings, self._namespace
            )
            url = store_url(self._settings).encode()
            before = self._client.set(store_name(self._namespace), url, get=True)
            if before not in (None, url):
                log.warning(
                    "artifact store URL changed",
                    hint="use one TUNA_ARTIFACTS_URL for all coordinators",
                )
        self._has_published_bootstrap = True

    def _read_keys(self) -> Keys:
        with reading(self._engine) as connection:
            return sessions.artifact_keys(connection, self._settings)

    def _drain_all(self) -> None:
        """Drain everything that is in the stream by now, including entries that are pending in
        another drain."""
        last = self._stream.last_id()
        limit = Throttle()
        limit.wait(2 * self._settings.lease_s)
        while not self._stream.drained_up_to(last) and not limit.is_due:
            if not self.drain.once() and not self.drain.take_over():
                time.sleep(0.05)
        self.drain.take_letters()
