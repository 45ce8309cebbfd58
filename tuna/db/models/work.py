"""Sessions, solvers and jobs, what was tried, and who works."""

from __future__ import annotations

from datetime import datetime
from typing import Any
from uuid import uuid4

import sqlalchemy as sa
from sqlalchemy import ForeignKey, Index, UniqueConstraint
from sqlalchemy.orm import Mapped, mapped_column

from tuna.db.models.base import Base, library_column, owner, table, text
from tuna.db.types import BigId, LongBlob, LongText, utc_now


class Installation(Base):
    """Properties of this database, one row: its namespace in a shared Redis and the secrets of its
    keys."""

    __tablename__ = "installation"
    id: Mapped[int] = mapped_column(primary_key=True)
    namespace: Mapped[str] = text(32)
    #: hex secret from which the key that signs artifacts is derived
    secret: Mapped[str] = text(64, server_default="")
    #: hex secret from which the gateways' TLS key is derived
    gateway_secret: Mapped[str] = text(64, server_default="")


class FormerKey(Base):
    """A key that signed artifacts before a rotation, and still verifies."""

    __tablename__ = "former_key"
    public: Mapped[str] = text(64, primary_key=True)  #: public key, hex
    superseded_at: Mapped[datetime] = mapped_column(default=utc_now)


class EnvironmentRow(Base):
    """An environment within which results are comparable; see `libraries.base.Environment`."""

    __tablename__ = "environment"
    id: Mapped[int] = mapped_column(primary_key=True)
    key: Mapped[str] = text(16, unique=True)
    library: Mapped[str] = library_column()
    library_version: Mapped[str] = text(128)
    arch: Mapped[str] = text(128)
    num_cu: Mapped[int]
    toolchain: Mapped[str] = text(128)
    device: Mapped[str] = text(255)
    target: Mapped[str] = mapped_column(LongText)
    flags: Mapped[dict[str, Any]]
    #: conditions of measurement; NULL: an environment older than the column, without any
    conditions: Mapped[dict[str, Any] | None]
    #: environment's key without the conditions
    machine_key: Mapped[str] = text(16, index=True, server_default="")


def _new_uuid() -> str:
    return str(uuid4())


class Session(Base):
    """One tuning run in one environment, with a reason."""

    __tablename__ = "session"
    id: Mapped[int] = mapped_column(primary_key=True)
    environment_id: Mapped[int] = mapped_column(ForeignKey("environment.id"))
    reason: Mapped[str] = text(255)
    #: options that differ from the defaults of `SessionOptions`
    options: Mapped[dict[str, Any] | None]
    created_at: Mapped[datetime] = mapped_column(default=utc_now)
    #: reason why coordinators do not serve it: see `coordinator.quarantine`; NULL: none
    fault: Mapped[str | None] = mapped_column(LongText)
    #: identity of the session, the same in every database that it is restored to
    uuid: Mapped[str] = text(36, default=_new_uuid, server_default="", index=True, unique=True)
    __table_args__ = table(UniqueConstraint("environment_id", "reason"))


class ServedTime(Base):
    """A time in which coordinators served a session; see `search.rounds`."""

    __tablename__ = "served_time"
    session_id: Mapped[int] = owner("session.id", primary_key=True)
    began_at: Mapped[datetime] = mapped_column(primary_key=True)
    ended_at: Mapped[datetime]  #: latest time at which the coordinator was seen to serve it
    __table_args__ = table()


class SolverRow(Base):
    """An implementation of a layer in a library; `valid` is false once a version no longer reports
    it."""

    __tablename__ = "solver"
    id: Mapped[int] = mapped_column(primary_key=True)
    library: Mapped[str] = library_column()
    name: Mapped[str] = text(128)
    kinds: Mapped[str] = text(255)
    algorithm: Mapped[str] = text(64)
    tunable: Mapped[bool]
    dynamic: Mapped[bool]
    valid: Mapped[bool]
    number: Mapped[int | None]  #: the library's own solver id, such as MIOpen's
    __table_args__ = table(UniqueConstraint("library", "name"))


class SolverApplicability(Base):
    """This solver can run this config in this session's environment."""

    __tablename__ = "solver_applicability"
    session_id: Mapped[int] = owner("session.id", primary_key=True)
    config_id: Mapped[int] = owner("config.id", primary_key=True, index=True)
    solver_id: Mapped[int] = owner("solver.id", primary_key=True, index=True)


class NoSolver(Base):
    """No solver of the session's library takes this config, and why; `loaded`: jobs were asked for
    it."""

    __tablename__ = "no_solver"
    session_id: Mapped[int] = owner("session.id", primary_key=True)
    config_id: Mapped[int] = owner("config.id", primary_key=True, index=True)
    reason: Mapped[str] = text(255)
    loaded: Mapped[bool] = mapped_column(default=False)
    __table_args__ = table()


class Search(Base):
    """One session × config × solver that is tuned in rounds, each of which is a job; see
    `search.rounds`."""

    __tablename__ = "search"
    id: Mapped[int] = mapped_column(BigId, primary_key=True)
    session_id: Mapped[int] = owner("session.id")
    config_id: Mapped[int] = mapped_column(ForeignKey("config.id"), index=True)
    solver_id: Mapped[int] = mapped_column(ForeignKey("solver.id"), index=True)
    steps: Mapped[str] = text(255)  #: steps of each round, as `job.steps`
    reason: Mapped[str] = text(255)  #: reason of each round
    options: Mapped[dict[str, Any]]  #: options of each round
    begun: Mapped[datetime | None]  #: time at which a worker began the first round
    #: reason for which no further round is opened; NULL: the search goes on
    stopped: Mapped[str | None] = text(255)
    __table_args__ = table(UniqueConstraint("session_id", "config_id", "solver_id", "steps"))


class Job(Base):
    """Session × config × solver with its steps, or a part of one round of a search: the unit of a
    lease.

    Only `jobs.states` decides its state.
    """

    __tablename__ = "job"
    id: Mapped[int] = mapped_column(BigId, primary_key=True)
    session_id: Mapped[int] = owner("session.id")
    config_id: Mapped[int] = mapped_column(ForeignKey("config.id"), index=True)
    solver_id: Mapped[int] = mapped_column(ForeignKey("solver.id"), index=True)
    steps: Mapped[str] = text(255)  #: all steps, comma-separated, in order
    #: search of which the job is a round; NULL: the job is not a round
    search_id: Mapped[int | None] = owner("search.id")
    #: number of the round in its search
    round: Mapped[int] = mapped_column(default=0, server_default="0")
    #: number of the part in its round: see `search.waiting_rounds`
    part: Mapped[int] = mapped_column(default=0, server_default="0")
    #: name of the next or current step; of a finished job the last one
    step: Mapped[str] = text(64)
    state: Mapped[str] = text(16)
    reason: Mapped[str] = text(255)
    options: Mapped[dict[str, Any]]
    #: number of claims, which is the fencing token of its results
    attempt: Mapped[int] = mapped_column(default=0)
    failures: Mapped[int] = mapped_column(default=0)  #: number of attempts that failed at this step
    #: number of failures that were not the job's fault
    uncharged: Mapped[int] = mapped_column(default=0, server_default="0")
    ready_at: Mapped[datetime | None]  #: earliest time of the next claim
    #: worker at which it failed last and that should leave it to others
    avoid: Mapped[str | None] = text(255)
    #: true if its worker died with it: published alone from now on
    isolate: Mapped[bool] = mapped_column(default=False)
    chunk: Mapped[str | None] = text(32, index=True)  #: the lease under which it is in flight
    leased_at: Mapped[datetime | None]
    cause: Mapped[str | None] = text(32)
    #: artifact hash of the problem's text, from the compile step
    workload: Mapped[str | None] = text(64)
    #: reason for which the job ended without an attempt; NULL: it did not, or it is a round
    stopped: Mapped[str | None] = text(255)
    updated_at: Mapped[datetime] = mapped_column(default=utc_now)
    __table_args__ = table(
        UniqueConstraint("session_id", "config_id", "solver_id", "steps", "round", "part"),
        Index("ix_job_claim", "session_id", "step", "state", "id"),
        Index(None, "search_id", "round"),
        Index(None, "session_id", "steps", "stopped"),
    )


class StepResultRow(Base):
    """One accepted attempt at a step: outcome, place, duration."""

    __tablename__ = "step_result"
    id: Mapped[int] = mapped_column(BigId, primary_key=True)
    job_id: Mapped[int] = owner("job.id")
    step: Mapped[str] = text(64)
    attempt: Mapped[int]
    ok: Mapped[bool]
    cause: Mapped[str | None] = text(32)
    output_tail: Mapped[str] = mapped_column(LongText)
    worker: Mapped[str] = text(255)
    device: Mapped[str] = text(255)
    started_at: Mapped[datetime | None]
    ended_at: Mapped[datetime | None]
    busy_s: Mapped[float]
    #: change of the device's speed during the attempt, as a share of the speed
    drift: Mapped[float | None]
    __table_args__ = table(
        UniqueConstraint("job_id", "step", "attempt"), Index(None, "cause", "job_id")
    )


class DeadLetter(Base):
    """A report that could not be drained, with its bytes and the reason."""

    __tablename__ = "dead_letter"
    id: Mapped[int] = mapped_column(BigId, primary_key=True)
    #: library that a coordinator needs to drain it; empty: it cannot be drained at all
    library: Mapped[str] = library_column()
    session_id: Mapped[int | None] = owner("session.id", index=True)
    fault: Mapped[str] = mapped_column(LongText)
    #: report's JSON, or whatever bytes were in its place
    body: Mapped[bytes] = mapped_column(LongBlob)
    created_at: Mapped[datetime] = mapped_column(default=utc_now)
    __table_args__ = table(Index(None, "library", "session_id"))


class TrialRow(Base):
    """One candidate of a job: its params, outcome and every repeat of its measurement."""

    __tablename__ = "trial"
    id: Mapped[int] = mapped_column(BigId, primary_key=True)
    job_id: Mapped[int] = owner("job.id")
    number: Mapped[int]  #: candidate index within the job
    params: Mapped[str | None] = mapped_column(LongText)
    artifact: Mapped[str | None] = text(64)
    #: step that its outcome is from; empty: its attempt failed as a whole
    step: Mapped[str] = text(64, default="", server_default="")
    cause: Mapped[str | None] = text(32)
    output_tail: Mapped[str] = mapped_column(LongText)
    times_ms: Mapped[str] = mapped_column(LongText)  #: JSON list of every repeat
    time_ms: Mapped[float | None]
    low_ms: Mapped[float | None]  #: lower end of the median's 95 % interval
    high_ms: Mapped[float | None]
    clock: Mapped[str] = text(8, default="", server_default="")  #: `libraries.items.Trial.clock`
    #: true if the measurement ended early: see `libraries.items.Trial`
    ended_early: Mapped[bool] = mapped_column(default=False, server_default=sa.false())
    max_error: Mapped[float | None]
    build_s: Mapped[float | None]
    parts: Mapped[str | None] = mapped_column(LongText)  #: JSON of `libraries.items.Trial.parts`
    measured_at: Mapped[datetime | None]
    __table_args__ = table(UniqueConstraint("job_id", "number"))


class WarmStartRow(Base):
    """A search that another one learns from, with its trials at the time when it was chosen; see
    `search.history`."""

    __tablename__ = "warm_start"
    search_id: Mapped[int] = owner("search.id", primary_key=True, autoincrement=False)
    #: rank of the search among those with the same `round`, the nearest first
    number: Mapped[int] = mapped_column(primary_key=True, autoincrement=False)
    #: first round that learns from this row; rows of a smaller number are not used from then on
    round: Mapped[int] = mapped_column(default=0, server_default="0")
    #: digest of the block that holds the trials
    digest: Mapped[str] = mapped_column(ForeignKey("kernel.digest"), index=True)
    origin: Mapped[str] = text(16)  #: relation to the search that learns: `search.history.Origin`
    noisy: Mapped[bool]  #: true if its device was not quiet
    trials: Mapped[int]
    label: Mapped[str] = text(255)  #: text for people: the layer, and where it was measured


class JobArtifact(Base):
    """An artifact in the store that a job needs which has not ended; see
    `jobs.needed_artifacts`."""

    __tablename__ = "job_artifact"
    digest: Mapped[str] = text(64, primary_key=True)
    job_id: Mapped[int] = mapped_column(
        BigId,
        ForeignKey("job.id", ondelete="CASCADE"),
        primary_key=True,
        autoincrement=False,
        index=True,
    )


class DeviceRow(Base):
    """A device that results were measured on, with its measured peak throughput."""

    __tablename__ = "device"
    id: Mapped[int] = mapped_column(primary_key=True)
    environment_id: Mapped[int] = owner("environment.id")
    name: Mapped[str] = text(255)
    peak_gflops: Mapped[float | None]  #: highest throughput that was measured beside a result
    #: method by which the peak was measured: `libraries.probe.Probe.source`
    peak_source: Mapped[str] = text(8, default="", server_default="")
    updated_at: Mapped[datetime] = mapped_column(default=utc_now)
    __table_args__ = table(UniqueConstraint("environment_id", "name"))


class TokenRow(Base):
    """A join token, which one worker of a role uses once, or one of a visitor of the service; only
    its digest is stored."""

    __tablename__ = "token"
    id: Mapped[str] = text(16, primary_key=True)
    digest: Mapped[str] = text(64)  #: SHA-256 of the token's secret part
    #: `compile` or `eval` for a worker; `submit`, `read` or `admin` for a visitor
    role: Mapped[str] = text(16)
    #: name of the person or machine that it was made for
    label: Mapped[str] = text(128, server_default="")
    #: name of the only cache that its holder reaches; empty: none
    space: Mapped[str] = text(63, default="", server_default="")
    #: bytes of the entries that its holder put there, counted as `db.cache_entries` does
    space_bytes: Mapped[int] = mapped_column(sa.BigInteger, default=0, server_default="0")
    created_at: Mapped[datetime] = mapped_column(default=utc_now)
    expires_at: Mapped[datetime]
    used_at: Mapped[datetime | None]
    revoked_at: Mapped[datetime | None]


class WorkerRow(Base):
    """A worker that joined with a token; its state decides whether it has access."""

    __tablename__ = "worker"
    id: Mapped[int] = mapped_column(primary_key=True)
    name: Mapped[str] = text(128, unique=True)
    token_id: Mapped[str] = mapped_column(sa.String(16), ForeignKey("token.id"), index=True)
    digest: Mapped[str] = text(64, server_default="")  #: SHA-256 (hex) of its random secret
    role: Mapped[str] = text(16)
    host: Mapped[str] = text(255)
    device: Mapped[str] = text(255)
    #: comma-separated keys of the environments that it measures in; empty for compile workers
    environment: Mapped[str] = mapped_column(LongText)
    #: JSON list of toolchains; empty for eval workers
    toolchain: Mapped[str] = mapped_column(LongText)
    #: number of chunks that it can run at a time
    processes: Mapped[int] = mapped_column(default=1, server_default="1")
    state: Mapped[str] = text(16)  #: active, cordoned, draining or revoked
    joined_at: Mapped[datetime] = mapped_column(default=utc_now)
    seen_at: Mapped[datetime] = mapped_column(default=utc_now)
    revoked_at: Mapped[datetime | None]


class ActionRow(Base):
    """A change that somebody made through the service: who, when and what."""

    __tablename__ = "action"
    id: Mapped[int] = mapped_column(BigId, primary_key=True)
    at: Mapped[datetime] = mapped_column(default=utc_now)
    token_id: Mapped[str] = mapped_column(sa.String(16), ForeignKey("token.id"), index=True)
    what: Mapped[str] = text(32)  #: verb, such as retry, cancel, priority, cordon
    subject: Mapped[str] = text(255)  #: object of the change, such as `job 12` or `session 3`
    details: Mapped[str] = mapped_column(LongText)  #: JSON of what was asked for and what changed
    __table_args__ = table()


class RequestRow(Base):
    """A request of a visitor of the service: a model or layers, for an environment, within a
    budget; see `tuna_serve.requests`."""

    __tablename__ = "request"
    id: Mapped[int] = mapped_column(primary_key=True)
    token_id: Mapped[str] = mapped_column(sa.String(16), ForeignKey("token.id"), index=True)
    #: visitor's own name of the request: a second submission under it is the same request
    client_key: Mapped[str | None] = text(128)
    digest: Mapped[str] = text(64)  #: SHA-256 of all that was asked for
    kind: Mapped[str] = text(16)  #: `model` or `layers`
    name: Mapped[str] = text(128)
    wanted: Mapped[str] = mapped_column(LongText)  #: JSON: see `requests.asked.Asked`
    upload: Mapped[str] = text(64)  #: SHA-256 of the uploaded file, in the artifact store
    upload_bytes: Mapped[int] = mapped_column(sa.BigInteger)
    trials: Mapped[int]  #: maximum of trials that it may take, counted against its token's limit
    priority: Mapped[int]
    state: Mapped[str] = text(16)
    session_id: Mapped[int | None] = mapped_column(
        ForeignKey("session.id", ondelete="SET NULL"), index=True
    )
    #: tag of its layers, once they are stored
    tag: Mapped[str] = text(128, server_default="")
    #: reason of the failure, or the part of its target that it missed
    message: Mapped[str] = mapped_column(LongText)
    progress: Mapped[str] = mapped_column(LongText)  #: JSON of the numbers of jobs, trials, ...
    #: JSON of the name, digest and bytes of each file of the answer
    files: Mapped[str] = mapped_column(LongText)
    files_bytes: Mapped[int] = mapped_column(sa.BigInteger, default=0)
    created_at: Mapped[datetime] = mapped_column(default=utc_now)
    updated_at: Mapped[datetime] = mapped_column(default=utc_now)
    tuning_at: Mapped[datetime | None]  #: time at which its first job was loaded
    #: time of its end; NULL: it is open
    ended_at: Mapped[datetime | None] = mapped_column(index=True)
    __table_args__ = table(UniqueConstraint("token_id", "client_key"))


class CacheEntryRow(Base):
    """A file that a holder of a space's token put into its cache; see `db.cache_entries`."""

    __tablename__ = "cache_entry"
    id: Mapped[int] = mapped_column(BigId, primary_key=True)
    space: Mapped[str] = text(63)
    key: Mapped[str] = text(255)
    file: Mapped[str] = text(255)
    digest: Mapped[str] = text(64, index=True)  #: SHA-256 of the bytes, in the artifact store
    size_bytes: Mapped[int] = mapped_column(sa.BigInteger)
    token_id: Mapped[str] = mapped_column(sa.String(16), ForeignKey("token.id"), index=True)
    #: number of times that other bytes were put under this key
    refused: Mapped[int] = mapped_column(default=0)
    created_at: Mapped[datetime] = mapped_column(default=utc_now)
    used_at: Mapped[datetime] = mapped_column(default=utc_now)
    __table_args__ = table(
        UniqueConstraint("space", "key", "file"),
        Index(None, "space", "used_at"),
    )


class CacheHoldRow(Base):
    """A pack has this key of a space, whose entries are not evicted."""

    __tablename__ = "cache_hold"
    space: Mapped[str] = text(63, primary_key=True)
    key: Mapped[str] = text(255, primary_key=True)
    pack: Mapped[str] = text(255, primary_key=True)
    __table_args__ = table()
