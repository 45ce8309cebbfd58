"""A master: a session for one target whose workers are elsewhere, with its trace, its logs and the
table of its results."""

from __future__ import annotations

import contextlib
import json
import re
import time
from collections.abc import Callable, Collection, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

import sqlalchemy as sa

from tuna.api import Progress, RunEvents
from tuna.api.jobs import LoadedJobs, Options, load_jobs
from tuna.api.preparation import init_session, update_applicability, update_solvers
from tuna.api.rows import ConfigRow, Job, configs, open_database, reading, writing
from tuna.api.running import enqueue, log_trials
from tuna.api.services import artifact_store
from tuna.api.sessions import set_session
from tuna.api.workers import count_workers
from tuna.configs import Config, Workload
from tuna.errors import BadInput, ServiceError
from tuna.exports.trial_log import TrialLog
from tuna.libraries.abilities import environment_of
from tuna.libraries.base import FINALS
from tuna.libraries.options import check
from tuna.libraries.registry import get_library
from tuna.libraries.tvm import toolchain
from tuna.vocabulary import END_STATES
from tuna_remote.commit import Commit, commit
from tuna_remote.trace import Trace, header_of
from tuna_remote.trace_restore import restore, session_of

#: Characters of a target that its folder of logs has not, and number of those that it has
_UNSAFE, _FOLDER_CHARS = re.compile(r"[^A-Za-z0-9._=+,-]+"), 200
#: Owner of a master's sessions, which a coordinator for all sessions leaves to it
_OWNER = "tune-rpc"
_TABLE = re.compile(r"[A-Za-z0-9_-][A-Za-z0-9_.-]{0,126}")
#: How often all jobs are compared with the trace; those that this process drains are written at
#: once.
_COMPARE_EVERY_S = 30.0


@dataclass(frozen=True)
class MasterPlan:
    """The task of a master."""

    target: str  #: JSON, or the text of older releases of TVM
    workloads: Sequence[Workload]
    table: str  #: path of the table of committed results; also the session's label
    options: Options  #: options of the jobs
    log_url: str = ""  #: URL of the folder for the trials of each job; empty: none
    tvm_tracker: str = ""  #: HOST:PORT of the boards' tracker; empty: none is asked
    device_key: str = ""
    library: str = "tvm"

    @property
    def layers(self) -> Sequence[Config]:
        """The workloads without their bodies, once each."""
        return list({one.config.key: one.config for one in self.workloads}.values())

    @property
    def bodies(self) -> dict[str, bytes]:
        """The bodies of the workloads by their SHA-256."""
        return {digest: body for one in self.workloads for digest, body in one.bodies.items()}


@dataclass(frozen=True)
class LayerCounts:
    """Numbers of a session's layers: those without open jobs, and all."""

    done: int
    total: int
    workers: int  #: live ones that measure for the session


@dataclass(frozen=True)
class Master:
    """A session that is ready to be worked through."""

    session_id: int
    target: str  #: the target's text for people
    loaded: LoadedJobs
    restored: bool  #: True if it came from the trace, because the database lacked it
    unsolved: Sequence[str]  #: labels of the plan's layers that no solver can run
    others: int  #: number of earlier jobs with other options than the plan's
    engine: sa.Engine
    trace: Trace
    logs: TrialLog | None

    def counts(self) -> LayerCounts:
        """The layers, and the live workers."""
        distinct = sa.select(sa.func.count(sa.distinct(Job.config_id))).where(
            Job.session_id == self.session_id
        )
        with reading(self.engine) as connection:
            total = connection.execute(distinct).scalar_one()
            still = connection.execute(distinct.where(Job.state.not_in(END_STATES))).scalar_one()
        return LayerCounts(total - still, total, count_workers(self.session_id))

    def run(self, on_counts: Callable[[LayerCounts], None]) -> None:
        """Fill the queues and drain results until every job has ended; the same master started
        again goes on."""
        compared_at = time.monotonic()

        def stored(job_ids: Collection[int]) -> None:
            self.trace.record(self.engine, self.session_id, job_ids)
            self._log(job_ids)

        def progress(_: Progress) -> None:
            nonlocal compared_at
            on_counts(self.counts())
            if time.monotonic() - compared_at >= _COMPARE_EVERY_S:
                compared_at = time.monotonic()
                self.catch_up()

        with self.logs or contextlib.nullcontext():
            self._log(self._ended())  # what an interrupted master did not
            try:
                enqueue(self.session_id, on_progress=progress, events=RunEvents(on_stored=stored))
            finally:
                self.catch_up()
        if self.logs is not None and self.logs.counts.waiting:
            raise ServiceError(
                f"A log cannot be written to {self.logs.shown}: {self.logs.counts.reason}.",
                hint="nothing else is lost: the same command with its trace file writes them",
            )

    def catch_up(self) -> None:
        """Trace and log what others drained, or what ended without a result."""
        self._log(self.trace.record(self.engine, self.session_id))

    def _log(self, job_ids: Collection[int]) -> None:
        if self.logs is not None:
            self.logs.add(job_ids)

    def _ended(self) -> Sequence[int]:
        mine = (Job.session_id == self.session_id, Job.state.in_(END_STATES))
        with reading(self.engine) as connection:
            return connection.execute(sa.select(Job.id).where(*mine)).scalars().all()

    def commit(self, path: Path, n_best: int) -> Commit:
        """Add the session's results to a table, of which the `n_best` of each layer stay; see
        `tuna_remote.commit`."""
        with reading(self.engine) as connection:
            return commit(connection, self.session_id, path, n_best)


@contextlib.contextmanager
def start_master(plan: MasterPlan, trace_file: Path | None) -> Iterator[Master]:
    """Prepare the session of a plan: that of its trace file, restored from it where the database
    does not have it. None: one in the current folder.

    Raises BadInput, before anything is stored, for a plan that cannot be, a trace file that is none
    or in use, and one of another table or target.
    """
    if not _TABLE.fullmatch(plan.table):
        text = (
            "A table's name has up to 127 letters, digits and _ . -, and does not begin with a dot"
        )
        raise BadInput(f"{text}; {plan.table!r} is none.")
    options = check(get_library(plan.library).options, plan.options, plan.library)
    engine = open_database()  # and the log, to which a target may be a warning
    facts, words = _target(plan)
    trace_file = trace_file or _default_trace(engine, plan, facts)
    with contextlib.closing(Trace(trace_file)) as trace:
        if trace.header is not None and trace.header.label != plan.table:
            raise BadInput(
                f"The trace {trace_file} is of the table {trace.header.label}, not of {plan.table}."
            )
        update_solvers(plan.library)
        session_id, restored = _session(engine, plan, facts, trace)
        set_session(session_id, owner=_OWNER)
        folder = _UNSAFE.sub("_", words)[:_FOLDER_CHARS]
        logs = log_trials(plan.log_url, folder) if plan.log_url else None
        loaded = _load(engine, plan, session_id)
        trace.begin(engine, session_id)
        trace.record(engine, session_id)
        unsolved, others = (
            _unsolved(engine, session_id, plan.layers),
            _others(engine, session_id, options),
        )
        yield Master(session_id, words, loaded, restored, unsolved, others, engine, trace, logs)


def _default_trace(engine: sa.Engine, plan: MasterPlan, facts: dict[str, str]) -> Path:
    """The trace file of a plan for which none was named: the newest one here of its table, target
    and database that no master appends to, so that the same command goes on, else a new one."""
    key = environment_of(get_library(plan.library), facts).key
    for path in sorted(Path().glob("lorien-tune-*.trace"), reverse=True):
        header = header_of(path)
        if header and (header.label, header.environment.key) == (plan.table, key):
            with reading(engine) as connection:
                if session_of(connection, header) is not None:
                    return path
    return Path(f"lorien-tune-{time.time_ns() // 1_000_000}.trace")


def _target(plan: MasterPlan) -> tuple[dict[str, str], str]:
    """The facts of the session's environment, none for this machine's own, and the target in
    words."""
    if plan.library != "tvm":
        return {}, plan.target
    target = toolchain.parse(plan.target)
    words = toolchain.to_words(target)
    if plan.tvm_tracker or plan.device_key:
        facts = {"tvm_tracker": plan.tvm_tracker, "device_key": plan.device_key}
        return {"target": toolchain.to_text(target), **facts}, words
    if not toolchain.is_foreign(target) and toolchain.is_own(
        target, json.loads(get_library("tvm").environment().target)
    ):
        return {}, words
    return {"target": toolchain.to_text(target)}, words


def _session(
    engine: sa.Engine, plan: MasterPlan, facts: dict[str, str], trace: Trace
) -> tuple[int, bool]:
    """The session of the trace, else that of the plan; True if it was restored."""
    if trace.header is None:
        return init_session(plan.library, plan.table, facts).id, False
    library = get_library(plan.library)
    here = environment_of(library, facts)
    if here.key != trace.header.environment.key:
        of = trace.header.environment
        raise BadInput(
            f"The trace {trace.path} is of {of} ({of.target}), and this master is for"
            f" {here} ({here.target}).",
            hint="results of two environments do not compare: begin a new trace file",
        )
    with reading(engine) as connection:
        session_id = session_of(connection, trace.header)
    if session_id is not None:
        return session_id, False
    store = artifact_store(engine)
    store.prepare()
    return restore(engine, trace, store.put), True


def _load(engine: sa.Engine, plan: MasterPlan, session_id: int) -> LoadedJobs:
    if plan.workloads:
        with writing(engine) as connection:
            configs.store(connection, plan.layers, plan.table, bodies=plan.bodies)
    update_applicability(session_id, plan.table)
    return load_jobs(session_id, tag=plan.table, reason=plan.table, options=plan.options)


def _unsolved(engine: sa.Engine, session_id: int, layers: Sequence[Config]) -> list[str]:
    """Labels of layers that have no job."""
    query = sa.select(ConfigRow.key).join(Job, Job.config_id == ConfigRow.id)
    with reading(engine) as connection:
        keys = set(
            connection.execute(query.where(Job.session_id == session_id).distinct()).scalars()
        )
    return [layer.label for layer in layers if layer.key not in keys]


def _others(engine: sa.Engine, session_id: int, options: Options) -> int:
    """Return the number of jobs with other options; finals have none."""
    query = sa.select(Job.options).where(Job.session_id == session_id, Job.steps != FINALS)
    with reading(engine) as connection:
        return sum(found != options for found in connection.execute(query).scalars())
