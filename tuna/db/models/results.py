"""Results that are kept: the find db, kernels, golden versions, times of whole models; and reported
times."""

from __future__ import annotations

from datetime import datetime
from typing import Any

import sqlalchemy as sa
from sqlalchemy import ForeignKey, Index, UniqueConstraint
from sqlalchemy.orm import Mapped, mapped_column

from tuna.db.models.base import Base, library_column, table, text
from tuna.db.types import BigId, LongBlob, LongText, utc_now


class KernelRow(Base):
    """Bytes that are needed permanently (a winner's code, a problem's text, a config's body), by
    their SHA-256."""

    __tablename__ = "kernel"
    digest: Mapped[str] = text(64, primary_key=True)
    blob: Mapped[bytes] = mapped_column(LongBlob)
    size_bytes: Mapped[int] = mapped_column(sa.BigInteger)


class FindDb(Base):
    """The best verified time of a solver for a config in a session, or an imported database's entry
    for it."""

    __tablename__ = "find_db"
    id: Mapped[int] = mapped_column(primary_key=True)
    session_id: Mapped[int] = mapped_column(ForeignKey("session.id", ondelete="CASCADE"))
    config_id: Mapped[int] = mapped_column(ForeignKey("config.id"), index=True)
    solver_id: Mapped[int] = mapped_column(ForeignKey("solver.id"))
    #: None for an imported row
    job_id: Mapped[int | None] = mapped_column(ForeignKey("job.id"), index=True)
    time_ms: Mapped[float | None]  #: None: an imported perf db knows only params
    workspace_bytes: Mapped[int] = mapped_column(sa.BigInteger)
    params: Mapped[str] = mapped_column(LongText)
    #: as the library reported it; empty: the solver's algorithm
    algorithm: Mapped[str] = text(64, default="")
    trial_number: Mapped[int | None]
    #: finals that its time is from
    final_job_id: Mapped[int | None] = mapped_column(ForeignKey("job.id"), index=True)
    source: Mapped[str | None] = text(255)  #: the file it was imported from, with its SHA-256
    #: not measured on a device
    simulated: Mapped[bool] = mapped_column(default=False, server_default=sa.false())
    #: the device was not quiet
    noisy: Mapped[bool] = mapped_column(default=False, server_default=sa.false())
    clock: Mapped[str] = text(8, default="", server_default="")  #: that of its trial
    workload: Mapped[str | None] = mapped_column(
        sa.String(64), ForeignKey("kernel.digest"), index=True
    )
    updated_at: Mapped[datetime] = mapped_column(default=utc_now)
    __table_args__ = table(
        UniqueConstraint("session_id", "config_id", "solver_id"),
        Index(None, "simulated", "session_id"),
        Index(None, "noisy", "session_id"),
        Index(None, "updated_at"),
        Index(None, "solver_id", "session_id", "config_id"),
    )

    @classmethod
    def measured_by(cls) -> sa.ColumnElement[int]:
        """The job that its time is from: finals, or the solver's own."""
        return sa.func.coalesce(cls.final_job_id, cls.job_id)


class FindDbKernel(Base):
    """A code object that a find-db row needs."""

    __tablename__ = "find_db_kernel"
    find_db_id: Mapped[int] = mapped_column(
        ForeignKey("find_db.id", ondelete="CASCADE"), primary_key=True
    )
    number: Mapped[int] = mapped_column(primary_key=True, autoincrement=False)
    kernel: Mapped[str] = mapped_column(sa.String(64), ForeignKey("kernel.digest"), index=True)
    #: the key under which the library loads it; empty: exporters generate one
    name: Mapped[str] = text(1024)
    args: Mapped[str] = mapped_column(LongText)


class Golden(Base):
    """A numbered release of a library's results; once promoted it never changes."""

    __tablename__ = "golden"
    id: Mapped[int] = mapped_column(primary_key=True)
    library: Mapped[str] = library_column()
    version: Mapped[int]
    state: Mapped[str] = text(16)  #: draft, promoted or withdrawn
    base_version: Mapped[int | None]
    created_at: Mapped[datetime] = mapped_column(default=utc_now)
    promoted_at: Mapped[datetime | None]
    promoted_by: Mapped[str] = text(255, default="", server_default="")
    note: Mapped[str | None] = mapped_column(LongText)  #: of who promoted it
    __table_args__ = table(UniqueConstraint("library", "version"))


class GoldenEntry(Base):
    """One result of a golden version, with its provenance: session, environment, worker, device,
    time."""

    __tablename__ = "golden_entry"
    id: Mapped[int] = mapped_column(BigId, primary_key=True)
    golden_id: Mapped[int] = mapped_column(ForeignKey("golden.id", ondelete="CASCADE"))
    arch: Mapped[str] = text(128)
    num_cu: Mapped[int]
    config_id: Mapped[int] = mapped_column(ForeignKey("config.id"), index=True)
    solver_id: Mapped[int] = mapped_column(ForeignKey("solver.id"))
    session_id: Mapped[int] = mapped_column(ForeignKey("session.id"))
    #: library commit, toolchain
    environment_id: Mapped[int] = mapped_column(ForeignKey("environment.id"), index=True)
    time_ms: Mapped[float]
    workspace_bytes: Mapped[int] = mapped_column(sa.BigInteger)
    params: Mapped[str] = mapped_column(LongText)
    algorithm: Mapped[str] = text(64)
    noisy: Mapped[bool] = mapped_column(default=False, server_default=sa.false())
    clock: Mapped[str] = text(8, default="", server_default="")
    problem_key: Mapped[str | None] = text(255)
    workload: Mapped[str | None] = mapped_column(
        sa.String(64), ForeignKey("kernel.digest"), index=True
    )
    worker: Mapped[str] = text(255)
    device: Mapped[str] = text(255)
    source: Mapped[str | None] = text(255)
    measured_at: Mapped[datetime | None]
    __table_args__ = table(
        UniqueConstraint("golden_id", "arch", "num_cu", "config_id", "solver_id"),
        Index(None, "measured_at"),
        Index(None, "session_id", "config_id"),
        Index(None, "solver_id", "session_id", "config_id"),
    )


class GoldenKernel(Base):
    """A code object that a golden entry needs; kept even if the session's results change."""

    __tablename__ = "golden_kernel"
    golden_entry_id: Mapped[int] = mapped_column(
        ForeignKey("golden_entry.id", ondelete="CASCADE"), primary_key=True
    )
    number: Mapped[int] = mapped_column(primary_key=True, autoincrement=False)
    kernel: Mapped[str] = mapped_column(sa.String(64), ForeignKey("kernel.digest"), index=True)
    name: Mapped[str] = text(1024)
    args: Mapped[str] = mapped_column(LongText)


class PredictorRow(Base):
    """A predictor that was trained from trials, and how good it is on layers that it has not
    seen."""

    __tablename__ = "predictor"
    name: Mapped[str] = text(128, primary_key=True)
    library: Mapped[str] = library_column()
    arch: Mapped[str] = text(64)  #: of the trials; empty: any
    since: Mapped[datetime | None]  #: that they were measured
    seed: Mapped[int] = mapped_column(sa.BigInteger)
    library_version: Mapped[str] = text(255)  #: of the library whose trials they are
    seen: Mapped[str] = text(64)  #: SHA-256 of the trials
    trials: Mapped[int]
    layers: Mapped[int]
    model: Mapped[str] = mapped_column(sa.String(64), ForeignKey("kernel.digest"), index=True)
    #: `Table` of each layer, of the package tuna-predict
    tables: Mapped[str] = mapped_column(sa.String(64), ForeignKey("kernel.digest"), index=True)
    evaluation: Mapped[str] = mapped_column(LongText)  #: JSON of its `Evaluation`
    in_answers: Mapped[bool] = mapped_column(default=False, server_default=sa.false())
    in_searches: Mapped[bool] = mapped_column(default=False, server_default=sa.false())
    created_at: Mapped[datetime] = mapped_column(default=utc_now)
    __table_args__ = table()


class Benchmark(Base):
    """The time of a whole model on a board or this machine; those of one lease, measured in turn,
    have the same run."""

    __tablename__ = "benchmark"
    id: Mapped[int] = mapped_column(primary_key=True)
    run: Mapped[str] = text(36)
    number: Mapped[int]  #: in its run
    model_id: Mapped[int | None] = mapped_column(
        ForeignKey("model.id", ondelete="SET NULL"), index=True
    )
    label: Mapped[str] = text(255)  #: name of its file
    artifact: Mapped[str] = text(64)  #: SHA-256 of it
    function: Mapped[str] = text(128)
    tracker: Mapped[str] = text(255)  #: of TVM RPC; empty: this machine
    device: Mapped[str] = text(255)  #: device key, or name of the CPU
    extents: Mapped[dict[str, Any]]  #: values of the open ones
    inputs: Mapped[str] = mapped_column(LongText)
    time_ms: Mapped[float]  #: median
    low_ms: Mapped[float]  #: 95 % interval of the median
    high_ms: Mapped[float]
    repeats: Mapped[int]
    noisy: Mapped[bool]
    #: against the first of its run; NULL: not finite, or of another shape
    error: Mapped[float | None]
    created_at: Mapped[datetime] = mapped_column(default=utc_now)
    __table_args__ = table(UniqueConstraint("run", "number"))


class Reported(Base):
    """A time that another program measured and Tuna did not; never joined with results."""

    __tablename__ = "reported"
    id: Mapped[int] = mapped_column(BigId, primary_key=True)
    #: SHA-256 of source, subject, implementation, device and versions
    digest: Mapped[str] = text(64, unique=True)
    source: Mapped[str] = text(16)  #: format of the report: triton, tunableop, hipblaslt
    subject: Mapped[str] = mapped_column(LongText)  #: what was timed, in that format's words
    #: of the layer, where the subject names one; it need not be stored
    config_key: Mapped[str | None] = text(64, index=True)
    implementation: Mapped[str] = mapped_column(LongText)  #: solution or config, in its words
    time_ms: Mapped[float | None]  #: None: it failed
    device: Mapped[str] = text(128)  #: architecture; empty: not known
    versions: Mapped[dict[str, Any]]  #: text by name, of all that decides whether it is usable
    who: Mapped[str] = text(255)  #: id of a token, or the user of the machine
    origin: Mapped[str] = text(255)  #: file or cache space
    reported_at: Mapped[datetime] = mapped_column(default=utc_now)
    __table_args__ = table(Index(None, "source", "id"))
