"""Time of `tuna query` over 1,000,000 results of 100,000 layers.

Twenty sessions in four environments share the layers; there are trials, an import and a golden
version. Every question is asked three times, the best counts; the plain one also as a command, with
the start of Python. The baseline is one statement with all joins, sorted and cut by the database.
"""

from __future__ import annotations

import resource
import subprocess
import sys
import time
from collections.abc import Callable
from dataclasses import dataclass
from datetime import datetime, timedelta, timezone
from functools import partial
from typing import TYPE_CHECKING, Any

from benchmarks.harness import Outcome, command_line
from benchmarks.servers import home

if TYPE_CHECKING:
    import sqlalchemy as sa

BUDGET_S = 1.0
PER_LAYER = 10
_SESSIONS, _ENVIRONMENTS = 20, 4
_BATCH = 10_000
_REPEATS = 3
_START = datetime(2026, 1, 1, tzinfo=timezone.utc)
#: Results whose time is after this are one in a thousand, in any order.
_LATE = _START + timedelta(days=365)


def main() -> int:
    """Command line; `--rows`: results of sessions and imports."""
    parser = command_line(__doc__, rows=1_000_000)
    parser.add_argument("--db", choices=("sqlite", "mariadb"), default="sqlite")
    options = parser.parse_args()
    with home(options.db):
        return _measure(options.db, options.rows)


def _measure(db: str, rows: int) -> int:
    from tuna.db.database import open_database, upgrade
    from tuna.db.engine import make_engine, reading
    from tuna.results.result_query import query
    from tuna.settings import get_settings

    engine = make_engine(get_settings().sql_url)
    upgrade(engine)
    fill(engine, Filling(rows // PER_LAYER))
    release(engine, 1, session_id=2)
    engine.dispose()
    figures: dict[str, float] = {"rows": rows}
    engine = open_database()
    with reading(engine) as connection:
        for name, wanted in _questions().items():
            figures[f"{name}_s"] = _best(partial(query, connection, wanted))
            figures[f"{name}_rows"] = len(query(connection, wanted))
        baseline = _best(lambda: connection.execute(_one_statement()).all())
    command = [sys.executable, "-m", "tuna", "query", "--json"]
    before = _children_s()
    figures["command_s"] = _best(lambda: subprocess.run(command, check=True, capture_output=True))
    limits = {name: BUDGET_S for name in figures if name.endswith("_s")}
    figures["command_cpu_s"] = (_children_s() - before) / _REPEATS
    return Outcome(f"query {db}", figures, {"one_statement_s": baseline}, limits=limits).print()


def _children_s() -> float:
    """CPU seconds of the child processes that have ended."""
    used = resource.getrusage(resource.RUSAGE_CHILDREN)
    return used.ru_utime + used.ru_stime


def _best(call: Any) -> float:
    times = []
    for _ in range(_REPEATS):
        started = time.perf_counter()
        call()
        times.append(time.perf_counter() - started)
    return min(times)


def _questions() -> dict[str, Any]:
    from tuna.results.result_rows import ResultFilter as Ask

    return {
        "all": Ask(),
        "layer": Ask(layer="gemm 16x16x77777 NN fp32"),
        "model": Ask(model="net"),
        "tag": Ask(tag="bench"),
        "kind_and_type": Ask(op="gemm", dtype="fp32"),
        "no_such_type": Ask(dtype="fp16"),
        "shape": Ask(shape=("k=77777",)),
        "session": Ask(session_id=7),
        "arch": Ask(arch="arch1"),
        "solver": Ask(solver="Solver3"),
        "rare_solver": Ask(solver="Rare"),
        "solver_not_in_session": Ask(solver="Solver3", session_id=8),
        "device_of_many": Ask(device="gpu3"),
        "since_late": Ask(since=_LATE),
        "since_early": Ask(since=_START),
        "golden_and_import": Ask(session_id=1, limit=1000),
        "n_best": Ask(n_best=2),
        "n_best_of_session": Ask(n_best=2, session_id=7, since=_START),
    }


def _halves(layer: Any, solver: Any) -> Any:
    """Solver s of a layer was tuned in session s or s + 10, so that each session has a twentieth of
    the results."""
    return solver + PER_LAYER * (layer % 2)


@dataclass(frozen=True)
class Filling:
    """Results of a database: ten solvers of each layer, each in one session."""

    layers: int
    trials: int = 2  #: of each job
    session_of: Callable[[Any, Any], Any] = _halves  #: id by those of layer and solver
    imported: int = 1  #: id of the session whose results are from a file


def fill(engine: sa.Engine, wanted: Filling) -> None:
    """Store results with jobs, attempts and trials."""
    import sqlalchemy as sa

    from tuna.configs import GemmConfig
    from tuna.db import configs, models, networks, sessions
    from tuna.db.engine import writing
    from tuna.db.models import (
        ConfigRow,
        FindDb,
        Job,
        ModelConfig,
        SolverRow,
        StepResultRow,
        TrialRow,
    )
    from tuna.libraries.base import Environment

    add = partial(_add, engine)
    for start in range(0, wanted.layers, _BATCH):
        numbers = range(start, min(wanted.layers, start + _BATCH))
        with writing(engine) as connection:
            configs.store(
                connection, [GemmConfig(m=16, n=16, k=number + 1) for number in numbers], "bench"
            )
    with writing(engine) as connection:
        for number in range(_SESSIONS):
            where = number % _ENVIRONMENTS
            here = Environment(
                "noop", "1", f"arch{where}", 1, "toolchain", device=f"device {where}"
            )
            sessions.create(connection, here, f"night {number}")
        names = [*(f"Solver{number}" for number in range(PER_LAYER)), "Rare"]
        facts: dict[str, Any] = {
            "library": "noop",
            "kinds": "gemm",
            "algorithm": "Direct",
            "tunable": True,
            "dynamic": False,
            "valid": True,
        }
        connection.execute(sa.insert(SolverRow), [{"name": name, **facts} for name in names])
        for environment in range(1, _ENVIRONMENTS + 1):
            rows = [
                {"environment_id": environment, "name": f"gpu{n}", "updated_at": _START}
                for n in range(4)
            ]
            connection.execute(sa.insert(models.DeviceRow), rows)
        networks.add_model(connection, networks.Named("net", "1"))
        networks.add_framework(connection, networks.Named("torch", "1"))
    net = sa.select(
        sa.literal(1).label("model_id"),
        sa.literal(1).label("framework_id"),
        ConfigRow.id.label("config_id"),
    )
    add(ModelConfig, net.where(ConfigRow.id % 200 == 0), gpu_count=1, weight=3)
    keys = sa.select(
        wanted.session_of(ConfigRow.id, SolverRow.id).label("session_id"),
        ConfigRow.id.label("config_id"),
        SolverRow.id.label("solver_id"),
    )
    jobs = keys.select_from(ConfigRow).join(
        SolverRow, sa.and_(SolverRow.name != "Rare", SolverRow.id <= PER_LAYER)
    )
    facts = {
        "steps": "measure",
        "step": "measure",
        "state": "evaluated",
        "reason": "bench",
        "options": {},
    }
    add(Job, jobs, **facts, attempt=1, failures=0, isolate=False, updated_at=_START)
    time_ms = 0.01 + (Job.id * 7919 + Job.solver_id * 104729) % 100003 / sa.literal(1000.0)
    trial = sa.select(Job.id.label("job_id"), time_ms.label("time_ms"))
    for number in range(wanted.trials):
        slower = sa.select(Job.id.label("job_id"), (time_ms + number).label("time_ms"))
        texts = {
            "params": f"p{number}",
            "output_tail": "",
            "times_ms": "[1.0,1.1]",
            "clock": "wall",
        }
        add(
            TrialRow,
            slower if number else trial,
            number=number,
            **texts,
            measured_at=_START,
            max_error=1e-7,
        )
    device = sa.case(*((Job.id % 4 == n, f"gpu{n}") for n in range(3)), else_="gpu3").label(
        "device"
    )
    attempt = sa.select(Job.id.label("job_id"), device)
    facts = {
        "step": "measure",
        "attempt": 1,
        "ok": True,
        "output_tail": "",
        "worker": "w",
    }
    add(StepResultRow, attempt, **facts, started_at=_START, ended_at=_START, busy_s=0.1)
    late = sa.case(
        (Job.id % 1000 == 0, sa.literal(_LATE, FindDb.__table__.c.updated_at.type)),
        else_=sa.literal(_START, FindDb.__table__.c.updated_at.type),
    ).label("updated_at")
    imported = Job.session_id == wanted.imported
    result = sa.select(
        Job.session_id,
        Job.config_id,
        Job.solver_id,
        time_ms.label("time_ms"),
        late,
        sa.case((imported, sa.null()), else_=Job.id).label("job_id"),
        sa.case((imported, "a.fdb.txt"), else_=sa.null()).label("source"),
    )
    facts = {
        "workspace_bytes": 0,
        "params": "p0",
        "algorithm": "",
        "trial_number": 0,
        "clock": "wall",
    }
    add(FindDb, result, **facts, simulated=False, noisy=False)
    with writing(engine) as connection:
        connection.execute(
            sa.insert(FindDb),
            [
                {
                    "session_id": 2,
                    "config_id": c,
                    "solver_id": PER_LAYER + 1,
                    "time_ms": 1.0,
                    "updated_at": _START,
                    "workspace_bytes": 0,
                    "params": "",
                    "algorithm": "",
                }
                for c in (1, 9)
            ],
        )


def release(engine: sa.Engine, version: int, *, session_id: int, most: int | None = None) -> None:
    """Store a golden version with the results of a session; `most`: that many at most."""
    import sqlalchemy as sa

    from tuna.db.engine import writing
    from tuna.db.models import FindDb, Golden, GoldenEntry

    row = {"library": "noop", "version": version, "state": "promoted", "created_at": _START}
    with writing(engine) as connection:
        made = connection.execute(sa.insert(Golden).values(row)).inserted_primary_key
    assert made is not None
    (golden_id,) = made
    entry = sa.select(FindDb.config_id, FindDb.solver_id, FindDb.session_id, FindDb.time_ms)
    facts = {
        "golden_id": golden_id,
        "arch": "arch1",
        "num_cu": 1,
        "environment_id": 2,
        "workspace_bytes": 0,
        "params": "p0",
    }
    _add(
        engine,
        GoldenEntry,
        entry.where(FindDb.session_id == session_id).order_by(FindDb.config_id).limit(most),
        **facts,
        algorithm="",
        noisy=False,
        clock="wall",
        worker="w",
        device="gpu0",
        measured_at=_START,
    )


def _add(engine: sa.Engine, table: Any, query: Any, **values: Any) -> None:
    """Insert the rows of a query, whose columns have their names, with literals behind them."""
    import sqlalchemy as sa

    from tuna.db.engine import writing

    columns = table.__table__.c
    literals = [sa.literal(value, columns[name].type).label(name) for name, value in values.items()]
    names = [*query.selected_columns.keys(), *values]
    with writing(engine) as connection:
        connection.execute(
            sa.insert(table).from_select(
                names, query.add_columns(*literals), include_defaults=False
            )
        )


def _one_statement() -> sa.Executable:
    import sqlalchemy as sa

    from tuna.db.models import ConfigRow, EnvironmentRow, FindDb, Session, SolverRow, TrialRow

    best = sa.and_(TrialRow.job_id == FindDb.job_id, TrialRow.number == FindDb.trial_number)
    return (
        sa.select(
            ConfigRow.label, SolverRow.name, EnvironmentRow.arch, FindDb.time_ms, TrialRow.low_ms
        )
        .select_from(FindDb)
        .join(ConfigRow, ConfigRow.id == FindDb.config_id)
        .join(SolverRow, SolverRow.id == FindDb.solver_id)
        .join(Session, Session.id == FindDb.session_id)
        .join(EnvironmentRow, EnvironmentRow.id == Session.environment_id)
        .outerjoin(TrialRow, best)
        .order_by(ConfigRow.key, FindDb.time_ms, SolverRow.name)
        .limit(100)
    )


if __name__ == "__main__":
    raise SystemExit(main())
