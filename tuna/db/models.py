"""ORM models of all tables. Only Alembic creates them; a test compares the models with the migrations."""

from __future__ import annotations

from datetime import datetime
from typing import Any

import sqlalchemy as sa
from sqlalchemy import ForeignKey, Index, UniqueConstraint
from sqlalchemy.orm import DeclarativeBase, Mapped, mapped_column

from tuna.db.types import BigId, Double, LongBlob, LongText, UtcDateTime, utc_now

_NAMING = {
    "ix": "ix_%(table_name)s_%(column_0_N_name)s",
    "uq": "uq_%(table_name)s_%(column_0_N_name)s",
    "fk": "fk_%(table_name)s_%(column_0_name)s",
    "pk": "pk_%(table_name)s",
}
#: Binary collation: MySQL's default is case-insensitive and would make tag `A` and tag `a` equal.
TABLE_OPTIONS = {"mysql_engine": "InnoDB", "mysql_charset": "utf8mb4", "mysql_collate": "utf8mb4_bin"}


#: Lengths of the columns of `config` that a kind which somebody brings might exceed.
CONFIG_CHARS = {"json": 4096, "driver": 2048, "label": 255}


class Base(DeclarativeBase):
    """Root of the models."""

    metadata = sa.MetaData(naming_convention=_NAMING)
    type_annotation_map = {  # noqa: RUF012
        datetime: UtcDateTime(),
        float: Double,
        dict[str, Any]: sa.JSON(),
    }
    __table_args__: Any = TABLE_OPTIONS


def _table(*constraints: sa.schema.SchemaItem) -> tuple[Any, ...]:
    return (*constraints, TABLE_OPTIONS)


def _text(length: int, **options: Any) -> Mapped[Any]:
    return mapped_column(sa.String(length), **options)


def _library() -> Mapped[Any]:
    return mapped_column("library", sa.String(64), quote=True)  # a reserved word of MySQL 9


class Installation(Base):
    """Properties of this database, one row: its namespace in a shared Redis and its artifact signing key."""

    __tablename__ = "installation"
    id: Mapped[int] = mapped_column(primary_key=True)
    namespace: Mapped[str] = _text(32)
    secret: Mapped[str] = _text(64)  #: artifact signing key, hex


class Environment(Base):
    """An environment within which results are comparable; see `libraries.base.Environment`."""

    __tablename__ = "environment"
    id: Mapped[int] = mapped_column(primary_key=True)
    key: Mapped[str] = _text(16, unique=True)
    library: Mapped[str] = _library()
    library_version: Mapped[str] = _text(128)
    arch: Mapped[str] = _text(128)
    num_cu: Mapped[int]
    toolchain: Mapped[str] = _text(128)
    device: Mapped[str] = _text(255)
    target: Mapped[str] = mapped_column(LongText)
    flags: Mapped[dict[str, Any]]


class Session(Base):
    """One tuning run in one environment, with a reason."""

    __tablename__ = "session"
    id: Mapped[int] = mapped_column(primary_key=True)
    environment_id: Mapped[int] = mapped_column(ForeignKey("environment.id"))
    reason: Mapped[str] = _text(255)
    created_at: Mapped[datetime] = mapped_column(default=utc_now)
    __table_args__ = _table(UniqueConstraint("environment_id", "reason"))


class Config(Base):
    """One layer, whatever its kind, found by the hash of its canonical text."""

    __tablename__ = "config"
    id: Mapped[int] = mapped_column(primary_key=True)
    key: Mapped[str] = _text(64, unique=True)
    kind: Mapped[str] = _text(32)
    json: Mapped[str] = _text(
        CONFIG_CHARS["json"]
    )  #: its fields, as `Config.json_text` writes them: what a config is read from
    body: Mapped[str | None] = mapped_column(
        sa.String(64), ForeignKey("kernel.digest"), index=True
    )  #: what is too large for a field, where its kind has that
    driver: Mapped[str] = _text(
        CONFIG_CHARS["driver"]
    )  #: for people: the driver command, or the JSON where the kind has none
    label: Mapped[str] = _text(CONFIG_CHARS["label"])
    problem_key: Mapped[str | None] = _text(
        255, index=True
    )  #: MIOpen's name of it, as a find db has it, where it has one
    created_at: Mapped[datetime] = mapped_column(default=utc_now)


class ConvConfig(Base):
    """The fields of a convolution, under MIOpen's names, for people's own queries; written from `config.json`."""

    __tablename__ = "conv_config"
    config_id: Mapped[int] = mapped_column(ForeignKey("config.id", ondelete="CASCADE"), primary_key=True)
    spatial_dim: Mapped[int]
    batchsize: Mapped[int]
    in_channels: Mapped[int]
    in_d: Mapped[int]
    in_h: Mapped[int]
    in_w: Mapped[int]
    out_channels: Mapped[int]
    fil_d: Mapped[int]
    fil_h: Mapped[int]
    fil_w: Mapped[int]
    pad_d: Mapped[int]
    pad_h: Mapped[int]
    pad_w: Mapped[int]
    conv_stride_d: Mapped[int]
    conv_stride_h: Mapped[int]
    conv_stride_w: Mapped[int]
    dilation_d: Mapped[int]
    dilation_h: Mapped[int]
    dilation_w: Mapped[int]
    group_count: Mapped[int]
    trans_output_pad_d: Mapped[int]
    trans_output_pad_h: Mapped[int]
    trans_output_pad_w: Mapped[int]
    mode: Mapped[str] = _text(16)
    pad_mode: Mapped[str] = _text(16)
    direction: Mapped[str] = _text(1)
    in_layout: Mapped[str] = _text(8)
    fil_layout: Mapped[str] = _text(8)
    out_layout: Mapped[str] = _text(8)
    data_type: Mapped[str] = _text(16)


class GemmConfig(Base):
    """The fields of a matrix product, for people's own queries; written from `config.json`."""

    __tablename__ = "gemm_config"
    config_id: Mapped[int] = mapped_column(ForeignKey("config.id", ondelete="CASCADE"), primary_key=True)
    m: Mapped[int]
    n: Mapped[int]
    k: Mapped[int]
    batch_count: Mapped[int]
    trans_a: Mapped[bool]
    trans_b: Mapped[bool]
    data_type: Mapped[str] = _text(16)


class BatchNormConfig(Base):
    """The fields of a batch normalisation, under MIOpen's names, for people's own queries; written from `config.json`."""

    __tablename__ = "batch_norm_config"
    config_id: Mapped[int] = mapped_column(ForeignKey("config.id", ondelete="CASCADE"), primary_key=True)
    spatial_dim: Mapped[int]
    batchsize: Mapped[int]
    in_channels: Mapped[int]
    in_d: Mapped[int]
    in_h: Mapped[int]
    in_w: Mapped[int]
    mode: Mapped[int]
    run: Mapped[int]
    save: Mapped[int]
    alpha: Mapped[float]
    beta: Mapped[float]
    direction: Mapped[str] = _text(1)
    layout: Mapped[str] = _text(8)
    data_type: Mapped[str] = _text(16)


class ConfigTag(Base):
    """A name for a set of configs."""

    __tablename__ = "config_tag"
    tag: Mapped[str] = _text(128, primary_key=True)
    config_id: Mapped[int] = mapped_column(ForeignKey("config.id", ondelete="CASCADE"), primary_key=True, index=True)
    recurrent: Mapped[bool] = mapped_column(default=False)  #: tuned again whenever the library changes


class Model(Base):
    """A neural network, in one version."""

    __tablename__ = "model"
    id: Mapped[int] = mapped_column(primary_key=True)
    name: Mapped[str] = _text(128)
    version: Mapped[str] = _text(64)
    __table_args__ = _table(UniqueConstraint("name", "version"))


class Framework(Base):
    """A deep-learning framework, in one version."""

    __tablename__ = "framework"
    id: Mapped[int] = mapped_column(primary_key=True)
    name: Mapped[str] = _text(128)
    version: Mapped[str] = _text(64)
    __table_args__ = _table(UniqueConstraint("name", "version"))


class ModelConfig(Base):
    """A config of a network, for a framework and a number of GPUs, with its number of occurrences."""

    __tablename__ = "model_config"
    model_id: Mapped[int] = mapped_column(ForeignKey("model.id", ondelete="CASCADE"), primary_key=True)
    framework_id: Mapped[int] = mapped_column(ForeignKey("framework.id"), primary_key=True, index=True)
    config_id: Mapped[int] = mapped_column(ForeignKey("config.id", ondelete="CASCADE"), primary_key=True, index=True)
    gpu_count: Mapped[int] = mapped_column(primary_key=True, autoincrement=False)
    weight: Mapped[int]  #: number of lines of the imported file with this config


class Solver(Base):
    """An implementation of a layer in a library; `valid` is false once a version no longer reports it."""

    __tablename__ = "solver"
    id: Mapped[int] = mapped_column(primary_key=True)
    library: Mapped[str] = _library()
    name: Mapped[str] = _text(128)
    kinds: Mapped[str] = _text(255)
    algorithm: Mapped[str] = _text(64)
    tunable: Mapped[bool]
    dynamic: Mapped[bool]
    valid: Mapped[bool]
    number: Mapped[int | None]  #: the library's own solver id, such as MIOpen's
    __table_args__ = _table(UniqueConstraint("library", "name"))


class SolverApplicability(Base):
    """This solver can run this config in this session's environment."""

    __tablename__ = "solver_applicability"
    session_id: Mapped[int] = mapped_column(ForeignKey("session.id", ondelete="CASCADE"), primary_key=True)
    config_id: Mapped[int] = mapped_column(ForeignKey("config.id", ondelete="CASCADE"), primary_key=True, index=True)
    solver_id: Mapped[int] = mapped_column(ForeignKey("solver.id", ondelete="CASCADE"), primary_key=True, index=True)


class Job(Base):
    """Session × config × solver with its steps. Only `pipeline.states` decides its state."""

    __tablename__ = "job"
    id: Mapped[int] = mapped_column(BigId, primary_key=True)
    session_id: Mapped[int] = mapped_column(ForeignKey("session.id", ondelete="CASCADE"))
    config_id: Mapped[int] = mapped_column(ForeignKey("config.id"), index=True)
    solver_id: Mapped[int] = mapped_column(ForeignKey("solver.id"), index=True)
    steps: Mapped[str] = _text(255)  #: all steps, comma-separated, in order
    step: Mapped[str] = _text(64)  #: the next or current step; of a finished job the last one
    state: Mapped[str] = _text(16)
    reason: Mapped[str] = _text(255)
    options: Mapped[dict[str, Any]]
    attempt: Mapped[int] = mapped_column(default=0)  #: counts claims; the fencing token of results
    failures: Mapped[int] = mapped_column(default=0)  #: attempts that failed at this step
    uncharged: Mapped[int] = mapped_column(default=0, server_default="0")  #: failures that were not the job's fault
    ready_at: Mapped[datetime | None]  #: earliest time of the next claim
    avoid: Mapped[str | None] = _text(255)  #: worker that failed and should leave the job to others
    isolate: Mapped[bool] = mapped_column(default=False)  #: its worker died: published alone from now on
    chunk: Mapped[str | None] = _text(32, index=True)  #: the lease under which it is in flight
    leased_at: Mapped[datetime | None]
    cause: Mapped[str | None] = _text(32)
    workload: Mapped[str | None] = _text(64)  #: artifact hash of the problem's text, from the compile step
    updated_at: Mapped[datetime] = mapped_column(default=utc_now)
    __table_args__ = _table(
        UniqueConstraint("session_id", "config_id", "solver_id", "steps"),
        Index("ix_job_claim", "session_id", "step", "state", "id"),
    )


class StepResult(Base):
    """One accepted attempt at a step: outcome, place, duration."""

    __tablename__ = "step_result"
    id: Mapped[int] = mapped_column(BigId, primary_key=True)
    job_id: Mapped[int] = mapped_column(ForeignKey("job.id", ondelete="CASCADE"))
    step: Mapped[str] = _text(64)
    attempt: Mapped[int]
    ok: Mapped[bool]
    cause: Mapped[str | None] = _text(32)
    output_tail: Mapped[str] = mapped_column(LongText)
    reproduce: Mapped[str] = mapped_column(LongText)
    worker: Mapped[str] = _text(255)
    device: Mapped[str] = _text(255)
    started_at: Mapped[datetime | None]
    ended_at: Mapped[datetime | None]
    busy_s: Mapped[float]
    __table_args__ = _table(UniqueConstraint("job_id", "step", "attempt"), Index(None, "cause", "job_id"))


class Trial(Base):
    """One candidate of a job: its params, outcome and every repeat of its measurement."""

    __tablename__ = "trial"
    id: Mapped[int] = mapped_column(BigId, primary_key=True)
    job_id: Mapped[int] = mapped_column(ForeignKey("job.id", ondelete="CASCADE"))
    number: Mapped[int]  #: candidate index within the job
    params: Mapped[str | None] = mapped_column(LongText)
    artifact: Mapped[str | None] = _text(64)
    cause: Mapped[str | None] = _text(32)
    output_tail: Mapped[str] = mapped_column(LongText)
    times_ms: Mapped[str] = mapped_column(LongText)  #: JSON list
    time_ms: Mapped[float | None]
    max_error: Mapped[float | None]
    build_s: Mapped[float | None]
    measured_at: Mapped[datetime | None]
    __table_args__ = _table(UniqueConstraint("job_id", "number"))


class Kernel(Base):
    """Bytes that are needed permanently (a winner's code, a problem's text, a config's body), by their SHA-256."""

    __tablename__ = "kernel"
    digest: Mapped[str] = _text(64, primary_key=True)
    blob: Mapped[bytes] = mapped_column(LongBlob)
    size_bytes: Mapped[int] = mapped_column(sa.BigInteger)


class FindDb(Base):
    """The best verified time of a solver for a config in a session, or an imported database's entry for it."""

    __tablename__ = "find_db"
    id: Mapped[int] = mapped_column(primary_key=True)
    session_id: Mapped[int] = mapped_column(ForeignKey("session.id", ondelete="CASCADE"))
    config_id: Mapped[int] = mapped_column(ForeignKey("config.id"), index=True)
    solver_id: Mapped[int] = mapped_column(ForeignKey("solver.id"), index=True)
    job_id: Mapped[int | None] = mapped_column(ForeignKey("job.id"), index=True)  #: None for an imported row
    time_ms: Mapped[float | None]  #: None: an imported perf db knows only params
    workspace_bytes: Mapped[int] = mapped_column(sa.BigInteger)
    params: Mapped[str] = mapped_column(LongText)
    algorithm: Mapped[str] = _text(64, default="")  #: as the library reported it; empty: the solver's algorithm
    problem_key: Mapped[str | None] = _text(255)  #: as the library reported it; NULL: the config's
    trial_number: Mapped[int | None]
    source: Mapped[str | None] = _text(255)  #: the file it was imported from, with its SHA-256
    simulated: Mapped[bool] = mapped_column(default=False, server_default=sa.false())  #: not measured on a device
    workload: Mapped[str | None] = mapped_column(sa.String(64), ForeignKey("kernel.digest"), index=True)
    updated_at: Mapped[datetime] = mapped_column(default=utc_now)
    __table_args__ = _table(UniqueConstraint("session_id", "config_id", "solver_id"))


class FindDbKernel(Base):
    """A code object that a find-db row needs."""

    __tablename__ = "find_db_kernel"
    find_db_id: Mapped[int] = mapped_column(ForeignKey("find_db.id", ondelete="CASCADE"), primary_key=True)
    number: Mapped[int] = mapped_column(primary_key=True, autoincrement=False)
    kernel: Mapped[str] = mapped_column(sa.String(64), ForeignKey("kernel.digest"), index=True)
    name: Mapped[str] = _text(1024)  #: the key under which the library loads it; empty: exporters generate one
    args: Mapped[str] = mapped_column(LongText)


class Golden(Base):
    """A numbered release of a library's results; once promoted it never changes."""

    __tablename__ = "golden"
    id: Mapped[int] = mapped_column(primary_key=True)
    library: Mapped[str] = _library()
    version: Mapped[int]
    state: Mapped[str] = _text(16)  #: draft, promoted or withdrawn
    base_version: Mapped[int | None]
    created_at: Mapped[datetime] = mapped_column(default=utc_now)
    promoted_at: Mapped[datetime | None]
    __table_args__ = _table(UniqueConstraint("library", "version"))


class GoldenEntry(Base):
    """One result of a golden version, with its provenance: session, environment, worker, device, time."""

    __tablename__ = "golden_entry"
    id: Mapped[int] = mapped_column(BigId, primary_key=True)
    golden_id: Mapped[int] = mapped_column(ForeignKey("golden.id", ondelete="CASCADE"))
    arch: Mapped[str] = _text(128)
    num_cu: Mapped[int]
    config_id: Mapped[int] = mapped_column(ForeignKey("config.id"), index=True)
    solver_id: Mapped[int] = mapped_column(ForeignKey("solver.id"), index=True)
    session_id: Mapped[int] = mapped_column(ForeignKey("session.id"), index=True)
    environment_id: Mapped[int] = mapped_column(ForeignKey("environment.id"), index=True)  #: library commit, toolchain
    time_ms: Mapped[float]
    workspace_bytes: Mapped[int] = mapped_column(sa.BigInteger)
    params: Mapped[str] = mapped_column(LongText)
    algorithm: Mapped[str] = _text(64)
    problem_key: Mapped[str | None] = _text(255)
    workload: Mapped[str | None] = mapped_column(sa.String(64), ForeignKey("kernel.digest"), index=True)
    worker: Mapped[str] = _text(255)
    device: Mapped[str] = _text(255)
    source: Mapped[str | None] = _text(255)
    measured_at: Mapped[datetime | None]
    __table_args__ = _table(UniqueConstraint("golden_id", "arch", "num_cu", "config_id", "solver_id"))


class GoldenKernel(Base):
    """A code object that a golden entry needs; kept even if the session's results change."""

    __tablename__ = "golden_kernel"
    golden_entry_id: Mapped[int] = mapped_column(ForeignKey("golden_entry.id", ondelete="CASCADE"), primary_key=True)
    number: Mapped[int] = mapped_column(primary_key=True, autoincrement=False)
    kernel: Mapped[str] = mapped_column(sa.String(64), ForeignKey("kernel.digest"), index=True)
    name: Mapped[str] = _text(1024)
    args: Mapped[str] = mapped_column(LongText)


class Device(Base):
    """A device that results were measured on, with its measured peak throughput."""

    __tablename__ = "device"
    id: Mapped[int] = mapped_column(primary_key=True)
    environment_id: Mapped[int] = mapped_column(ForeignKey("environment.id", ondelete="CASCADE"))
    name: Mapped[str] = _text(255)
    peak_gflops: Mapped[float | None]
    updated_at: Mapped[datetime] = mapped_column(default=utc_now)
    __table_args__ = _table(UniqueConstraint("environment_id", "name"))


class Token(Base):
    """A one-time join token for one worker of one role; only its digest is stored."""

    __tablename__ = "token"
    id: Mapped[str] = _text(16, primary_key=True)
    digest: Mapped[str] = _text(64)  #: SHA-256 of the token's secret part
    role: Mapped[str] = _text(16)  #: compile or eval
    created_at: Mapped[datetime] = mapped_column(default=utc_now)
    expires_at: Mapped[datetime]
    used_at: Mapped[datetime | None]
    revoked_at: Mapped[datetime | None]


class Worker(Base):
    """A worker that joined with a token; its state decides whether it has access."""

    __tablename__ = "worker"
    id: Mapped[int] = mapped_column(primary_key=True)
    name: Mapped[str] = _text(128, unique=True)
    token_id: Mapped[str] = mapped_column(sa.String(16), ForeignKey("token.id"), index=True)
    password: Mapped[str] = _text(64)  #: SHA-256 (hex) of its random Redis password
    role: Mapped[str] = _text(16)
    host: Mapped[str] = _text(255)
    device: Mapped[str] = _text(255)
    environment: Mapped[str] = mapped_column(LongText)  #: keys, comma-separated; empty for compile workers
    toolchain: Mapped[str] = mapped_column(LongText)  #: JSON list; empty for eval workers
    state: Mapped[str] = _text(16)  #: active, cordoned, draining, gone or revoked
    joined_at: Mapped[datetime] = mapped_column(default=utc_now)
    seen_at: Mapped[datetime] = mapped_column(default=utc_now)
    revoked_at: Mapped[datetime | None]
