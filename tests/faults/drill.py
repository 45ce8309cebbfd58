"""One drill: run jobs on a cluster while the faults of a seed are injected, then check the
history."""

from __future__ import annotations

import signal
import sys
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path

import history
import sqlalchemy as sa
from cluster import LEASE_S, Cluster, ClusterError
from nemesis import Fault, Kind, plan

from tuna.configs import GemmConfig
from tuna.db import configs, database, jobs, sessions, solvers
from tuna.db.engine import make_engine, writing
from tuna.errors import DatabaseError, ServiceError
from tuna.libraries import registry

_SOLVERS = 10
_BEGIN_S = 30.0
_RECOVERY_S = 7.0
_STARTING_S = 60.0
_JOIN_S = 20.0
_POLL_S = 0.05
_SOME_ITEMS = 20
#: Seconds without another item, and until the end, after the last fault. Jobs that were lost with a
#: worker are done one by one, which takes minutes on a busy machine.
_STUCK_S, _END_S = 150.0, 400.0


@dataclass
class Report:
    """The outcome of a drill."""

    seed: int
    jobs: int
    objections: list[str] = field(default_factory=list)
    faults: int = 0  #: number of injected faults
    #: each fault with its time and the number of items begun by then
    happened: list[str] = field(default_factory=list)
    seconds: float = 0.0
    runs: int = 0  #: items begun
    lost: int = 0  #: attempts lost with their worker
    failed: int = 0  #: attempts that failed at a worker

    @property
    def ok(self) -> bool:
        return not self.objections


def repeat(seed: int) -> str:
    """The command that repeats the drill."""
    return f"scripts/bench faults --first-seed {seed} --seeds 1 --json"


def run(
    seed: int,
    folder: Path,
    job_count: int = 2000,
    faults: Sequence[Fault] | None = None,
    joined: Sequence[str] = (),
    *,
    more: Sequence[str] = (),
    in_redis: bool = False,
    refused_s: float = 0.0,
    slow: bool = False,
    stays: bool = False,
    forked: bool = False,
) -> Report:
    """Run the drill of a seed, or of the given faults, in `folder`, where the logs are kept.

    `joined`: those of the workers that join a gateway with a token; `more`: workers
    besides the usual ones; `in_redis`: artifacts are there; `refused_s`: so long Redis is read-only
    when the coordinator starts; `slow`: items take long until the last fault, so that workers are
    never idle; `stays`: the coordinator does not end with the session, but by SIGTERM after it;
    `forked`: workers and the coordinator are forks.
    """
    report = Report(seed, job_count)
    began = time.monotonic()
    with Cluster(folder, joined, in_redis=in_redis, stays=stays, forked=forked) as cluster:
        engine = make_engine(cluster.db_url)
        try:
            expected = _load(engine, folder / "plugin", job_count)
            for name in (*(["gateway"] if joined else []), "compile", *more, "eval"):
                cluster.start(name)
            if refused_s:
                cluster.refuse_writes("READONLY")
            cluster.start("coordinator")
            work = _Drill(cluster, report, slow=slow, gateways=["gateway"] if joined else [])
            if refused_s:
                work.wait(refused_s)
                cluster.accept_writes("READONLY")
            if stays:
                work.has_ended = lambda: not history.unfinished(engine)
            work.work_through(plan(seed, LEASE_S, joined) if faults is None else faults)
            if stays and (code := cluster.terminate("coordinator")):
                report.objections.append(f"the coordinator ended with {code} after SIGTERM")
            seen = history.read(engine, cluster.log, expected)
            report.runs, report.lost = (
                len(seen.runs),
                sum(row.cause == "worker_lost" for row in seen.attempts),
            )
            report.failed = sum(row.cause is not None and row.was_done for row in seen.attempts)
            report.objections += history.objections(seen)
        except (ClusterError, TimeoutError) as error:
            report.objections.append(str(error))
        finally:
            engine.dispose()
    report.seconds = time.monotonic() - began
    return report


def _load(engine: sa.Engine, plugin: Path, count: int) -> dict[int, history.Answer]:
    database.upgrade(engine)
    sys.path.append(str(plugin))  # where the library is declared
    registry.installed.cache_clear()
    try:
        library = registry.get_library("faults")
    finally:
        sys.path.remove(str(plugin))
        registry.installed.cache_clear()
    layers = [GemmConfig(m=8, n=8, k=number + 1) for number in range(count // _SOLVERS)]
    with writing(engine) as connection:
        session_id, _ = sessions.create(connection, library.environment(), "drill")
        configs.store(connection, layers, "t")
        solvers.update_solvers(connection, library)
    solvers.update_applicability(engine, library, session_id, "t")
    with writing(engine) as connection:
        request = jobs.JobRequest(session_id, "faults", history.STEPS, "drill", "new", tag="t")
        assert jobs.load(connection, request) == count
    return history.expected(engine)


class _Drill:
    """Injects the faults and waits for the end of the session."""

    def __init__(
        self, cluster: Cluster, report: Report, *, slow: bool, gateways: Sequence[str]
    ) -> None:
        self._slow = slow
        self._gateways = gateways
        self._cluster = cluster
        self._report = report
        self.has_ended = lambda: self._check(may_end=True) == 0
        self._began = time.monotonic()
        self._read = self._begun = 0  # position in the library's log: bytes, lines
        self._seen = 0  # items begun when a fault last began or ended
        self._share = 0  # of the items, for each fault
        self._active: list[tuple[float, Fault]] = []  # with the time of their end
        self._begin: dict[Kind, Callable[[Fault], object]] = {
            Kind.KILL_CHILD: self._kill_child,
            Kind.KILL: lambda fault: cluster.kill(fault.target),
            Kind.PAUSE: lambda fault: cluster.signal(fault.target, signal.SIGSTOP),
            Kind.REDIS_RESTART: lambda fault: cluster.kill(fault.target),
            Kind.REDIS_WIPE: self._kill_and_wipe,
            Kind.REDIS_FLUSH: lambda fault: cluster.flush_redis(),
            Kind.REDIS_REFUSES: lambda fault: cluster.refuse_writes(fault.error),
            Kind.MARIADB_RESTART: lambda fault: cluster.kill(fault.target),
            Kind.ARTIFACTS_FULL: self._fill_artifacts,
            Kind.DISK_FULL: self._fill_home,
            Kind.DEVICE_DEAD: lambda fault: cluster.kill_device(),
            Kind.DEVICE_FAILS: lambda fault: cluster.kill_device(answers=True),
            Kind.REVOKE: self._revoke,
            Kind.KEY_ROTATION: lambda fault: cluster.rotate_key(),
            Kind.CLOCK_STEP: lambda fault: cluster.step_clock(fault.target, fault.step_s),
        }
        self._end: dict[Kind, Callable[[Fault], object]] = {
            Kind.REVOKE: lambda fault: (
                cluster.is_alive(fault.target) or cluster.start(fault.target)
            ),
            Kind.PAUSE: lambda fault: cluster.signal(fault.target, signal.SIGCONT),
            Kind.REDIS_REFUSES: lambda fault: cluster.accept_writes(fault.error),
            Kind.ARTIFACTS_FULL: lambda fault: cluster.empty_artifacts(),
            Kind.DISK_FULL: lambda fault: cluster.empty_home(fault.target),
            Kind.DEVICE_DEAD: lambda fault: cluster.mend_device(),
            Kind.DEVICE_FAILS: lambda fault: cluster.mend_device(),
            Kind.KEY_ROTATION: lambda fault: cluster.kill(fault.target),
            Kind.CLOCK_STEP: lambda fault: cluster.step_clock(fault.target, 0.0),
        }

    def work_through(self, faults: Sequence[Fault]) -> None:
        """Inject every fault at its time, then wait for the end of the session; raises
        ClusterError."""
        self._share = len(history.STEPS) * self._report.jobs // (len(faults) + 1)
        self.wait(_BEGIN_S, self._has_resumed)
        for fault in faults:
            self.wait(fault.gap_s)
            if not fault.overlaps:
                self.wait(_RECOVERY_S, self._has_resumed)
            while any(active.target == fault.target for _, active in self._active):
                self.wait(_POLL_S)
            at_s = time.monotonic() - self._began
            self._report.happened.append(
                f"{at_s:.2f} s, {self._items_begun()} items begun: {fault}"
            )
            self._report.faults += 1
            self._begin[fault.kind](fault)
            self._seen = self._items_begun()
            if fault.lasts_s:
                self._active.append((time.monotonic() + fault.lasts_s, fault))
        while self._active:
            self.wait(_POLL_S)
        self._cluster.set_pace(slow=False)
        self._wait_for_end()

    def _wait_for_end(self) -> None:
        """Wait for the end of the session; raises TimeoutError."""
        end_by = time.monotonic() + _END_S
        stuck_by = time.monotonic() + _STUCK_S
        while not self.has_ended():
            self._check(may_end=True)
            if self._items_begun() > self._seen:
                self._seen, stuck_by = self._items_begun(), time.monotonic() + _STUCK_S
            if time.monotonic() > min(stuck_by, end_by):
                raise TimeoutError(f"the session does not end; {self._seen} items begun")
            time.sleep(_POLL_S)

    def wait(self, seconds: float, until: Callable[[], bool] = lambda: False) -> bool:
        """Wait up to `seconds` or until `until()`, while due faults end and processes are checked;
        returns `until()`."""
        deadline = time.monotonic() + seconds
        while time.monotonic() < deadline:
            self._keep_work_for_later()
            if until():
                return True
            self._check()
            for end_at, fault in list(self._active):
                if time.monotonic() >= end_at:
                    self._active.remove((end_at, fault))
                    self._end.get(fault.kind, lambda fault: self._cluster.start(fault.target))(
                        fault
                    )
                    self._seen = self._items_begun()
            time.sleep(_POLL_S)
        return False

    def _keep_work_for_later(self) -> None:
        """Slow the workers down while they are ahead: each fault has its share of the items,
        however long it takes."""
        self._cluster.set_pace(
            slow=self._slow or self._items_begun() >= self._share * (self._report.faults + 1)
        )

    def _has_resumed(self) -> bool:
        """True if items were begun since the last begin or end of a fault."""
        return self._items_begun() >= self._seen + _SOME_ITEMS

    def _check(self, *, may_end: bool = False) -> int | None:
        """Check that only the coordinator exits, and only after all faults; returns its exit code.

        A process that finds no server when it starts exits with an error; it is restarted, as on a
        real cluster.
        """
        cluster = self._cluster
        for name in ("compile", "eval", "coordinator", *self._gateways):
            code = cluster.exit_code(name)
            if code in (None, -signal.SIGKILL) or (may_end and name == "coordinator" and code == 0):
                continue
            if (
                code in (DatabaseError.exit_code, ServiceError.exit_code)
                and cluster.age_s(name) < _STARTING_S
            ):
                self._report.happened.append(f"{name} found no server when it started")
                cluster.start(name)
                continue
            early = "before the last fault" if code == 0 else f"with {code}"
            raise ClusterError(f"{name} ended by itself {early}:\n{cluster.log_tail(name)}")
        return cluster.exit_code("coordinator")

    def _items_begun(self) -> int:
        with open(self._cluster.log, "rb") as log:
            log.seek(self._read)
            new = log.read()
        self._read += len(new)
        self._begun += new.count(b"\n")
        return self._begun

    def _kill_child(self, fault: Fault) -> None:
        if not self.wait(_RECOVERY_S, lambda: self._cluster.kill_child(fault.target)):
            self._report.happened[-1] += " (there was none)"

    def _revoke(self, fault: Fault) -> None:
        if not self.wait(_JOIN_S, lambda: self._cluster.revoke(fault.target)):
            self._report.happened[-1] += " (it had not joined)"

    def _fill_artifacts(self, _: Fault) -> None:
        if not self._cluster.fill_artifacts():
            self._report.happened[-1] += " (not possible: this user may not mount)"

    def _fill_home(self, fault: Fault) -> None:
        if not self._cluster.fill_home(fault.target):
            self._report.happened[-1] += " (not possible: this user may not mount)"

    def _kill_and_wipe(self, fault: Fault) -> None:
        self._cluster.kill(fault.target)
        self._cluster.wipe_redis()
