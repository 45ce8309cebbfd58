"""Results that are kept: the find db, kernels, golden versions, times of whole models."""

from __future__ import annotations

from datetime import datetime
from typing import Any

import sqlalchemy as sa
from sqlalchemy import ForeignKey, Index, UniqueConstraint
from sqlalchemy.orm import Mapped, mapped_column

from tuna.db.models.base import Base, library_column, owner, table, text
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
    session_id: Mapped[int] = owner("session.id")
    config_id: Mapped[int] = mapped_column(ForeignKey("config.id"), index=True)
    solver_id: Mapped[int] = mapped_column(ForeignKey("solver.id"))
    #: job that measured it; NULL: an imported row
    job_id: Mapped[int | None] = mapped_column(ForeignKey("job.id"), index=True)
    time_ms: Mapped[float | None]  #: median; NULL: an imported perf db knows only params
    workspace_bytes: Mapped[int] = mapped_column(sa.BigInteger)
    params: Mapped[str] = mapped_column(LongText)
    #: algorithm as the library reported it; empty: the solver's algorithm
    algorithm: Mapped[str] = text(64, default="", server_default="")
    trial_number: Mapped[int | None]
    #: job of the finals that its time is from; NULL: none
    final_job_id: Mapped[int | None] = mapped_column(ForeignKey("job.id"), index=True)
    source: Mapped[str | None] = text(255)  #: imported file, with its SHA-256; NULL: measured here
    #: true if it was not measured on a device
    simulated: Mapped[bool] = mapped_column(default=False, server_default=sa.false())
    #: true if the device was not quiet
    noisy: Mapped[bool] = mapped_column(default=False, server_default=sa.false())
    clock: Mapped[str] = text(8, default="", server_default="")  #: clock of its trial
    workload: Mapped[str | None] = mapped_column(ForeignKey("kernel.digest"), index=True)
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
    find_db_id: Mapped[int] = owner("find_db.id", primary_key=True)
    number: Mapped[int] = mapped_column(primary_key=True, autoincrement=False)
    kernel: Mapped[str] = mapped_column(ForeignKey("kernel.digest"), index=True)
    #: key under which the library loads the code object; empty: exporters generate one
    name: Mapped[str] = text(1024)
    args: Mapped[str] = mapped_column(LongText)


class Golden(Base):
    """A numbered release of a library's results; once promoted it never changes."""

    __tablename__ = "golden"
    id: Mapped[int] = mapped_column(primary_key=True)
    library: Mapped[str] = library_column()
    version: Mapped[int]
    state: Mapped[str] = text(16)  #: state of the version: draft, promoted or withdrawn
    base_version: Mapped[int | None]
    created_at: Mapped[datetime] = mapped_column(default=utc_now)
    promoted_at: Mapped[datetime | None]
    promoted_by: Mapped[str] = text(255, default="", server_default="")
    note: Mapped[str | None] = mapped_column(LongText)  #: note of the person who promoted it
    __table_args__ = table(UniqueConstraint("library", "version"))


class GoldenEntry(Base):
    """One result of a golden version, with its provenance: session, environment, worker, device,
    time."""

    __tablename__ = "golden_entry"
    id: Mapped[int] = mapped_column(BigId, primary_key=True)
    golden_id: Mapped[int] = owner("golden.id")
    arch: Mapped[str] = text(128)
    num_cu: Mapped[int]
    config_id: Mapped[int] = mapped_column(ForeignKey("config.id"), index=True)
    solver_id: Mapped[int] = mapped_column(ForeignKey("solver.id"))
    session_id: Mapped[int] = mapped_column(ForeignKey("session.id"))
    #: environment of the measurement: library commit, toolchain, device
    environment_id: Mapped[int] = mapped_column(ForeignKey("environment.id"), index=True)
    time_ms: Mapped[float]
    workspace_bytes: Mapped[int] = mapped_column(sa.BigInteger)
    params: Mapped[str] = mapped_column(LongText)
    algorithm: Mapped[str] = text(64)
    noisy: Mapped[bool] = mapped_column(default=False, server_default=sa.false())
    clock: Mapped[str] = text(8, default="", server_default="")
    problem_key: Mapped[str | None] = text(255)
    workload: Mapped[str | None] = mapped_column(ForeignKey("kernel.digest"), index=True)
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
    golden_entry_id: Mapped[int] = owner("golden_entry.id", primary_key=True)
    number: Mapped[int] = mapped_column(primary_key=True, autoincrement=False)
    kernel: Mapped[str] = mapped_column(ForeignKey("kernel.digest"), index=True)
    name: Mapped[str] = text(1024)
    args: Mapped[str] = mapped_column(LongText)


class PredictorRow(Base):
    """A predictor that was trained from trials, and how good it is on layers that it has not
    seen."""

    __tablename__ = "predictor"
    name: Mapped[str] = text(128, primary_key=True)
    library: Mapped[str] = library_column()
    arch: Mapped[str] = text(64)  #: architecture of the trials; empty: any
    since: Mapped[datetime | None]  #: time after which the trials were measured; NULL: any
    seed: Mapped[int] = mapped_column(sa.BigInteger)
    library_version: Mapped[str] = text(255)  #: version of the library that the trials are of
    seen: Mapped[str] = text(64)  #: SHA-256 of the trials that it has learned from
    trials: Mapped[int]
    layers: Mapped[int]
    model: Mapped[str] = mapped_column(ForeignKey("kernel.digest"), index=True)
    #: digest of the `Table` of each layer, of the package tuna-predict
    tables: Mapped[str] = mapped_column(ForeignKey("kernel.digest"), index=True)
    #: JSON of its `Evaluation`, of the package tuna-predict
    evaluation: Mapped[str] = mapped_column(LongText)
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
    number: Mapped[int]  #: number of the row in its run
    model_id: Mapped[int | None] = mapped_column(
        ForeignKey("model.id", ondelete="SET NULL"), index=True
    )
    label: Mapped[str] = text(255)  #: name of the model's file
    artifact: Mapped[str] = text(64)  #: SHA-256 of the model's file
    function: Mapped[str] = text(128)
    tracker: Mapped[str] = text(255)  #: address of the TVM RPC tracker; empty: this machine
    device: Mapped[str] = text(255)  #: device key of the board, or name of this machine's CPU
    extents: Mapped[dict[str, Any]]  #: values of the model's open extents by name
    inputs: Mapped[str] = mapped_column(LongText)
    time_ms: Mapped[float]  #: median of the repeats
    low_ms: Mapped[float]  #: lower end of the median's 95 % interval
    high_ms: Mapped[float]
    repeats: Mapped[int]
    noisy: Mapped[bool]
    #: difference from the first model of its run, relative; NULL: not finite, or the shapes differ
    error: Mapped[float | None]
    created_at: Mapped[datetime] = mapped_column(default=utc_now)
    __table_args__ = table(UniqueConstraint("run", "number"))
