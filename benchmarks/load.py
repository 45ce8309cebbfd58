"""Time and memory of loading 1,000,000 jobs into MariaDB, and time of `tuna status` on them.

Layers, solvers and applicability are stored beforehand. Each load runs in a separate process, which
reports its peak memory; it counts as constant if ten times the jobs need at most 1.3 times the
bytes. The baseline inserts the same rows from Python, in batches, into the same table.
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
import time
from typing import Any

from benchmarks.harness import Outcome, command_line
from benchmarks.servers import CpuMeter, home, peak_mib

BUDGET_S = 30.0
BUDGET_STATUS_S = 1.0
BUDGET_MEMORY_RATIO = 1.3
_SOLVERS = 10
_SMALL = 10
_BATCH = 10_000
_BASELINE_JOBS = 50_000
_REPEATS = 3


def main() -> int:
    """Command line; `--jobs`: jobs of the larger load, the smaller one has a tenth."""
    parser = command_line(__doc__, jobs=1_000_000)
    parser.add_argument("--db", choices=("sqlite", "mariadb"), default="mariadb")
    parser.add_argument("--child", nargs=2, metavar=("SESSION", "TAG"), help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.child:
        return _child(int(options.child[0]), options.child[1])
    with home(options.db):
        return _measure(options.db, options.jobs)


def _measure(db: str, jobs: int) -> int:
    session_id = _make(jobs // _SOLVERS)
    baseline_per_s = _from_python(session_id)
    small = _load(session_id, "small")
    with CpuMeter() as meter:
        large = _load(session_id, "large")
    assert small["jobs"] + large["jobs"] == jobs // _SOLVERS * _SOLVERS, (small, large)
    again = _load(session_id, "large")
    assert again["jobs"] == 0, again
    status_s = min(_status() for _ in range(_REPEATS))
    figures = {
        "jobs": large["jobs"],
        "load_s": large["s"] + small["s"],
        "load_per_s": large["jobs"] / large["s"],
        "load_cpu_s": sum(meter.seconds().values()),
        "load_again_s": again["s"],
        "small_mib": small["mib"],
        "large_mib": large["mib"],
        "status_s": status_s,
    }
    ratios = {
        "memory_large_vs_small": large["mib"] / small["mib"],
        "load_vs_python": figures["load_per_s"] / baseline_per_s,
    }
    limits = {
        "load_s": BUDGET_S,
        "status_s": BUDGET_STATUS_S,
        "memory_large_vs_small": BUDGET_MEMORY_RATIO,
    }
    baseline = {"from_python_per_s": baseline_per_s}
    return Outcome(f"load {db}", figures, baseline, ratios, limits=limits).print()


def _load(session_id: int, tag: str) -> dict[str, float]:
    command = [sys.executable, "-m", "benchmarks.load", "--child", str(session_id), tag]
    found: dict[str, float] = json.loads(
        subprocess.run(command, check=True, stdout=subprocess.PIPE).stdout
    )
    return found


def _child(session_id: int, tag: str) -> int:
    from tuna.db import jobs
    from tuna.db.engine import make_engine, writing
    from tuna.settings import get_settings

    engine = make_engine(get_settings().sql_url)
    request = jobs.JobRequest(session_id, "noop", ("build", "measure"), "benchmark", "new", tag=tag)
    started = time.perf_counter()
    with writing(engine) as connection:
        loaded = jobs.load(connection, request)
    print(json.dumps({"s": time.perf_counter() - started, "mib": peak_mib(), "jobs": loaded}))
    return 0


def _status() -> float:
    started = time.perf_counter()
    subprocess.run([sys.executable, "-m", "tuna", "status"], check=True, stdout=subprocess.DEVNULL)
    return time.perf_counter() - started


def _make(layers: int) -> int:
    """Create a session: a tenth of its layers tagged `small`, the others `large`, all solvers."""
    import sqlalchemy as sa

    from tuna.configs import GemmConfig
    from tuna.db import configs, database, sessions, solvers
    from tuna.db.engine import make_engine, writing
    from tuna.db.models import ConfigRow, SolverApplicability, SolverRow
    from tuna.libraries.registry import get_library
    from tuna.settings import get_settings

    engine = make_engine(get_settings().sql_url)
    database.upgrade(engine)
    library = get_library("noop")
    with writing(engine) as connection:
        session_id, _ = sessions.create(connection, library.environment(), "benchmark")
        solvers.update_solvers(connection, library)
    small = layers // _SMALL
    for first, last, tag in ((0, small, "small"), (small, layers, "large")):
        for start in range(first, last, _BATCH):
            numbers = range(start, min(last, start + _BATCH))
            with writing(engine) as connection:
                configs.store(
                    connection, [GemmConfig(m=16, n=16, k=number + 1) for number in numbers], tag
                )
    with writing(engine) as connection:
        pairs = (
            sa.select(sa.literal(session_id), ConfigRow.id, SolverRow.id)
            .select_from(ConfigRow)
            .join(SolverRow, sa.true())
        )
        columns = ["session_id", "config_id", "solver_id"]
        connection.execute(sa.insert(SolverApplicability).from_select(columns, pairs))
    engine.dispose()
    return session_id


def _from_python(session_id: int) -> float:
    """Jobs per second of inserting rows from Python in batches; the rows are deleted afterwards."""
    import sqlalchemy as sa

    from tuna.db.engine import make_engine, writing
    from tuna.db.models import ConfigRow, Job, SolverRow
    from tuna.settings import get_settings

    engine = make_engine(get_settings().sql_url)
    with writing(engine) as connection:
        configs = (
            connection.execute(sa.select(ConfigRow.id).limit(_BASELINE_JOBS // _SOLVERS))
            .scalars()
            .all()
        )
        solvers = connection.execute(sa.select(SolverRow.id)).scalars().all()
        started = time.perf_counter()
        for start in range(0, len(configs), _BATCH // _SOLVERS):
            batch = configs[start : start + _BATCH // _SOLVERS]
            connection.execute(
                sa.insert(Job), [_row(session_id, c, s) for c in batch for s in solvers]
            )
        seconds = time.perf_counter() - started
        connection.execute(sa.delete(Job))
    engine.dispose()
    return len(configs) * len(solvers) / seconds


def _row(session_id: int, config_id: int, solver_id: int) -> dict[str, Any]:
    facts = {
        "steps": "baseline",
        "step": "baseline",
        "state": "new",
        "reason": "benchmark",
        "options": {},
    }
    return {"session_id": session_id, "config_id": config_id, "solver_id": solver_id, **facts}


if __name__ == "__main__":
    raise SystemExit(main())
