"""Databases for tests, made of a few calls; `python tests/builders.py OUT.sqlite` writes one to
look at."""

from __future__ import annotations

import base64
import functools
import hashlib
import json
import random
import sqlite3
import statistics
from collections.abc import Sequence
from dataclasses import dataclass, field
from datetime import datetime, timedelta, timezone
from typing import Any

import sqlalchemy as sa

from tuna.configs import Config as Layer
from tuna.configs import parse_line
from tuna.db import configs, models
from tuna.db.models import Base
from tuna.libraries.tvm.toolchain import toolchain_of

START = datetime(2026, 3, 2, 9, 30, tzinfo=timezone.utc)
#: Layers of a small residual network and two matrix products, as MIOpenDriver has them.
DRIVERS = (
    "./bin/MIOpenDriver conv -n 1 -c 3 -H 224 -W 224 -k 64 -y 7 -x 7 -p 3 -q 3 -u 2 -v 2 -F 1",
    "./bin/MIOpenDriver conv -n 1 -c 64 -H 56 -W 56 -k 64 -y 3 -x 3 -p 1 -q 1 -u 1 -v 1 -F 1",
    "./bin/MIOpenDriver conv -n 1 -c 64 -H 56 -W 56 -k 256 -y 1 -x 1 -p 0 -q 0 -u 1 -v 1 -F 1",
    "./bin/MIOpenDriver conv -n 1 -c 128 -H 28 -W 28 -k 128 -y 3 -x 3 -p 1 -q 1 -u 1 -v 1 -F 1",
    "./bin/MIOpenDriver conv -n 1 -c 512 -H 14 -W 14 -k 1024 -y 1 -x 1 -p 0 -q 0 -u 2 -v 2 -F 1",
    "./bin/MIOpenDriver gemm --a_h 1 --a_w 2048 --b_w 1000",
)
TVM_SOLVERS = {
    "TvmConvDirectNCHW": "Direct",
    "TvmConvNCHWc": "Direct",
    "TvmConvIm2col": "GEMM",
    "TvmGemm": "GEMM",
}


def memory() -> sa.Engine:
    """An empty database with all tables, in memory."""
    connection = sqlite3.connect(":memory:")
    _all_tables().backup(connection)
    return sa.create_engine("sqlite://", creator=lambda: connection, poolclass=sa.StaticPool)


@functools.cache
def _all_tables() -> sqlite3.Connection:
    """To be copied, for SQLAlchemy takes long to write the statements that make them."""
    connection = sqlite3.connect(":memory:")
    Base.metadata.create_all(
        sa.create_engine("sqlite://", creator=lambda: connection, poolclass=sa.StaticPool)
    )
    return connection


def digest(data: bytes) -> str:
    """SHA-256 as artifacts are named."""
    return hashlib.sha256(data).hexdigest()


@dataclass
class DatabaseBuilder:
    """Adds rows through one connection; every helper returns the id of what it added."""

    connection: sa.Connection
    clock: datetime = START
    solvers: dict[tuple[str, str], int] = field(default_factory=dict)

    def insert(self, model: type[Base], **values: Any) -> Any:
        """One row; returns its primary key, or the tuple of its parts."""
        # a statement of the table, whose values are parameters, costs a third of one of the model
        table = sa.inspect(model).local_table
        key = self.connection.execute(sa.insert(table), values).inserted_primary_key
        assert key is not None
        return key[0] if len(key) == 1 else tuple(key)

    def session(
        self,
        library: str = "tvm",
        arch: str = "znver5",
        num_cu: int = 2,
        reason: str = "nightly",
        **fields: Any,
    ) -> int:
        """A session in a new environment."""
        values = {
            "key": digest(f"{library}{arch}{num_cu}{reason}".encode())[:16],
            "library": library,
            "library_version": "0.27.0.post1",
            "arch": arch,
            "num_cu": num_cu,
            "toolchain": toolchain_of("0.27.0.post1"),
            "device": "AMD EPYC 9B45",
            "target": '{"kind":"llvm","mcpu":"znver5","num-cores":2}',
            "flags": {"threads": "1"},
        }
        environment = self.insert(models.EnvironmentRow, **(values | fields))
        return int(
            self.insert(
                models.Session, environment_id=environment, reason=reason, created_at=self.clock
            )
        )

    def config(self, layer: str | Layer, tag: str | None = None) -> int:
        """The row of a layer, made if it is new."""
        config = parse_line(layer)[0] if isinstance(layer, str) else layer
        found = self.connection.execute(
            sa.select(models.ConfigRow.id).where(models.ConfigRow.key == config.key)
        ).scalar_one_or_none()
        config_id = found if found is not None else self._new_config(config)
        if tag is not None:
            self.insert(models.ConfigTag, tag=tag, config_id=config_id, recurrent=False)
        return int(config_id)

    def _new_config(self, config: Layer) -> int:
        (config_id,) = configs.store(self.connection, [config], None).ids
        assert config_id is not None
        return config_id

    def solver(
        self, name: str, library: str = "tvm", algorithm: str = "Direct", tunable: bool = True
    ) -> int:
        """The row of a solver, made if it is new."""
        if (library, name) not in self.solvers:
            self.solvers[library, name] = self.insert(
                models.SolverRow,
                library=library,
                name=name,
                kinds="convolution,gemm",
                algorithm=algorithm,
                tunable=tunable,
                dynamic=False,
                number=None,
                valid=True,
            )
        return self.solvers[library, name]

    def job(
        self, session: int, config: int, solver: int, state: str = "evaluated", **fields: Any
    ) -> int:
        """A job that went through compile and eval; with the step `search` a round, whose search is
        made unless it is there."""
        values = {
            "steps": "compile,eval",
            "step": "eval",
            "reason": "nightly",
            "options": {},
            "updated_at": self.clock,
        }
        values |= {"session_id": session, "config_id": config, "solver_id": solver}
        values |= {"state": state, **fields}
        if str(values["steps"]).startswith("search,"):
            values["search_id"] = self._search(values, values.pop("stopped", None))
        return int(self.insert(models.Job, **values))

    def _search(self, job: dict[str, Any], stopped: object) -> int:
        key = ("session_id", "config_id", "solver_id", "steps")
        same = [getattr(models.Search, name) == job[name] for name in key]
        found = self.connection.execute(sa.select(models.Search.id).where(*same)).scalar()
        shared = {name: job[name] for name in (*key, "reason", "options")}
        return found or int(self.insert(models.Search, **shared, stopped=stopped))

    def kernel(self, data: bytes) -> str:
        """Stored bytes; returns their SHA-256."""
        name = digest(data)
        if (
            self.connection.execute(
                sa.select(models.KernelRow).where(models.KernelRow.digest == name)
            ).first()
            is None
        ):
            self.insert(models.KernelRow, digest=name, blob=data, size_bytes=len(data))
        return name

    def winner(
        self,
        session: int,
        config: int,
        solver: int,
        time_ms: float,
        job: int | None = None,
        **fields: Any,
    ) -> int:
        """A find-db row, with a job of its own unless one is given; `kernel` is a digest, `kernels`
        (digest, name, args)."""
        job = self.job(session, config, solver) if job is None else job
        kernels = fields.pop(
            "kernels", [(fields.pop("kernel"), "", "")] if "kernel" in fields else []
        )
        values = {
            "workspace_bytes": 0,
            "params": "",
            "algorithm": "",
            "trial_number": 0,
            "updated_at": self.clock,
        }
        row = int(
            self.insert(
                models.FindDb,
                session_id=session,
                config_id=config,
                solver_id=solver,
                job_id=job,
                time_ms=time_ms,
                **(values | fields),
            )
        )
        for number, (digest_, name, args) in enumerate(kernels):
            self.insert(
                models.FindDbKernel,
                find_db_id=row,
                number=number,
                kernel=digest_,
                name=name,
                args=args,
            )
        return row

    def trial(self, job: int, number: int, time_ms: float | None, **fields: Any) -> int:
        """A trial, measured a second after the one before it."""
        self.clock += timedelta(seconds=1)
        values = {
            "params": schedule(number),
            "output_tail": "",
            "times_ms": json.dumps(
                [] if time_ms is None else [time_ms, time_ms * 1.02, time_ms * 0.99]
            ),
            "time_ms": time_ms,
            "measured_at": None if time_ms is None else self.clock,
        }
        return int(self.insert(models.TrialRow, job_id=job, number=number, **(values | fields)))

    def step(
        self, job: int, step: str, seconds: float, busy_s: float, device: str = "", **fields: Any
    ) -> int:
        """An attempt at a step that starts now and lets the clock go on by `seconds`."""
        start, self.clock = self.clock, self.clock + timedelta(seconds=seconds)
        values = {
            "attempt": 1,
            "ok": True,
            "output_tail": "",
            "worker": "compile@builder-1",
            "started_at": start,
            "ended_at": self.clock,
        }
        return int(
            self.insert(
                models.StepResultRow,
                job_id=job,
                step=step,
                busy_s=busy_s,
                device=device,
                **(values | fields),
            )
        )


def schedule(number: int) -> str:
    """Params as the tvm library writes them: a record without times."""
    trace = [[["EnterPostproc", []]], [[0, [1, 2, number]]]]
    return json.dumps(
        [trace, None, {"kind": "llvm", "num-cores": 2}, [["TENSOR", "float32", [1, 64]]]]
    )


def workload(name: str) -> bytes:
    """A workload artifact as the tvm library writes it."""
    module = base64.b64encode(f"module {name}".encode() * 20).decode()
    return json.dumps([str(int(digest(name.encode())[:15], 16)), module]).encode()


def times_of_search(generator: random.Random, best_ms: float, trials: int) -> list[float]:
    """Times of a search that gets better: each near `best_ms`, the early ones far from it."""
    return [
        round(best_ms * (1 + generator.expovariate(1.2) + 2.5 / (1 + 0.4 * number)), 6)
        for number in range(trials)
    ]


def tuned_network(build: DatabaseBuilder, trials: int = 24) -> int:
    """A tvm session as a night of tuning leaves it: winners, failed trials, a layer without any
    winner."""
    generator = random.Random(7)
    session = build.session(reason="resnet50 nightly, batch 1")
    device = "znver5 cpu0@tuner-1"
    environment = build.connection.execute(
        sa.select(models.Session.environment_id).where(models.Session.id == session)
    )
    build.insert(
        models.DeviceRow,
        environment_id=environment.scalar_one(),
        name=device,
        peak_gflops=178.4,
        updated_at=build.clock,
    )
    build.clock += timedelta(minutes=2)
    for index, driver in enumerate(DRIVERS):
        gemm = " gemm " in driver
        config = build.config(driver, tag="resnet50")
        best_ms = (parse_line(driver)[0].flops / 1e6) / (128 - 9 * index)
        solvers = ("TvmGemm",) if gemm else ("TvmConvDirectNCHW", "TvmConvNCHWc", "TvmConvIm2col")
        for place, name in enumerate(solvers):
            solver = build.solver(name, algorithm=TVM_SOLVERS[name])
            if index == 4:
                _failed_job(build, session, config, solver, device)
                continue
            _tuned_job(
                build,
                generator,
                session,
                config,
                solver,
                device,
                best_ms * (1 + 0.22 * place),
                trials,
            )
    last = build.config(DRIVERS[1])
    build.job(
        session,
        last,
        build.solver("TvmConvWinogradF4", algorithm="Winograd"),
        state="new",
        step="compile",
    )
    return session


def _tuned_job(
    build: DatabaseBuilder,
    generator: random.Random,
    session: int,
    config: int,
    solver: int,
    device: str,
    best_ms: float,
    trials: int,
) -> None:
    work = build.kernel(workload(f"{config} {solver}"))
    job = build.job(session, config, solver, workload=work)
    build.step(job, "compile", 9.0, 8.1)
    start = build.clock
    times = times_of_search(generator, best_ms, trials)
    for number, time_ms in enumerate(times):
        if number % 11 == 5:
            tail = 'error: "tile size" <script>alert(1)</script> & no register left\n  at line 12'
            build.trial(job, number, None, cause="build_error", output_tail=tail)
        elif number == 17:
            build.trial(job, number, None, cause="run_timeout", output_tail="killed after 5 s")
        else:
            build.trial(job, number, time_ms, build_s=0.31, max_error=4e-7)
    seconds = (build.clock - start).total_seconds()
    build.clock = start
    build.step(job, "eval", seconds, seconds * 0.81, device, worker="eval@tuner-1")
    good = [
        (time, number) for number, time in enumerate(times) if number % 11 != 5 and number != 17
    ]
    time_ms, number = min(good)
    build.winner(
        session,
        config,
        solver,
        time_ms,
        job=job,
        trial_number=number,
        params=schedule(number),
        workspace_bytes=4096 * number,
        workload=work,
        kernel=build.kernel(b"\x7fELF" + f"{config} {solver} ".encode() * 400),
    )


def _failed_job(
    build: DatabaseBuilder, session: int, config: int, solver: int, device: str
) -> None:
    job = build.job(session, config, solver, state="errored", cause="run_error", failures=3)
    tail = (
        "Traceback (most recent call last):\n  <b>InternalError</b>: Check failed: (offset == 0) is"
        " false"
    )
    build.trial(job, 0, None, cause="run_error", output_tail=tail)
    build.step(
        job, "eval", 3.0, 1.2, device, ok=False, cause="run_error", output_tail=tail, attempt=3
    )


def rows(connection: sa.Connection, model: type[Base]) -> Sequence[Any]:
    """All rows of a table."""
    return connection.execute(sa.select(model)).all()


def median(values: Sequence[float]) -> float:
    """The median, for expected values."""
    return statistics.median(values)


if __name__ == "__main__":
    import sys

    engine = sa.create_engine(f"sqlite:///{sys.argv[1]}")
    Base.metadata.create_all(engine)
    with engine.begin() as connection:
        print("session", tuned_network(DatabaseBuilder(connection)))
