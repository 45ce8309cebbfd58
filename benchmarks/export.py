"""Time and peak memory of exporting a session: 250,000 layers with four solvers each, from SQLite.

Each size is exported in a separate process, which reports its peak memory. The baseline is a lower
bound for any exporter: the same rows, joined and sorted by SQLite and written as text by plain
Python, in the same run. Memory counts as constant if a session with ten times the rows needs at
most 1.3 times the bytes.
"""

from __future__ import annotations

import argparse
import csv
import json
import os
import sqlite3
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from benchmarks.harness import Outcome, command_line
from benchmarks.servers import peak_mib

BUDGET_S = 30.0
BUDGET_MEMORY_RATIO = 1.3
_SOLVERS = (
    ("ConvBinWinogradRxSf2x3g1", "Winograd"),
    ("ConvHipImplicitGemmGroupFwdXdlops", "ImplicitGEMM"),
    ("ConvAsm3x3U", "Direct"),
    ("GemmFwdRest", "GEMM"),
)
_FORMS = ("find", "perf", "json")
_BATCH = 10_000
_SMALL = 10
_DUMP = (
    "SELECT config.problem_key, solver.name, find_db.time_ms, find_db.workspace_bytes,"
    " solver.algorithm FROM find_db JOIN config ON config.id = find_db.config_id JOIN solver ON"
    " solver.id = find_db.solver_id WHERE find_db.session_id = 1 ORDER BY config.problem_key,"
    " find_db.time_ms, solver.name"
)


def main() -> int:
    """Command line; `--rows`: find-db rows of the larger session, the smaller one has a tenth."""
    parser = command_line(__doc__, rows=1_000_000)
    parser.add_argument(
        "--child", nargs=3, metavar=("WHAT", "DATABASE", "DIRECTORY"), help=argparse.SUPPRESS
    )
    options = parser.parse_args()
    if options.child:
        return _child(*options.child)
    with tempfile.TemporaryDirectory(prefix="tuna-bench-") as folder:
        return _measure(options.rows, Path(folder))


def _measure(rows: int, folder: Path) -> int:
    sizes = {"small": rows // _SMALL, "large": rows}
    timings: dict[str, dict[str, float]] = {}
    for size, count in sizes.items():
        database = folder / f"{size}.sqlite"
        _make(database, count // len(_SOLVERS))
        for what in ("dump", *_FORMS):
            timings[f"{what}_{size}"] = _run(what, database, folder)
            if what != "dump":
                assert timings[f"{what}_{size}"]["entries"] == count // len(_SOLVERS) * len(
                    _SOLVERS
                )
        database.unlink()
    figures = {"rows_small": float(sizes["small"]), "rows_large": float(sizes["large"])}
    for what in _FORMS:
        for size in sizes:
            figures |= {
                f"{what}_{size}_{name}": timings[f"{what}_{size}"][name] for name in ("s", "mib")
            }
    ratios = {
        f"{what}_memory_large_vs_small": figures[f"{what}_large_mib"] / figures[f"{what}_small_mib"]
        for what in _FORMS
    }
    ratios |= {
        f"{what}_s_vs_dump": timings[f"{what}_large"]["s"] / timings["dump_large"]["s"]
        for what in _FORMS
    }
    baseline = {
        f"dump_{size}_{name}": timings[f"dump_{size}"][name]
        for size in sizes
        for name in ("s", "mib")
    }
    limits = {"find_large_s": BUDGET_S, "find_memory_large_vs_small": BUDGET_MEMORY_RATIO}
    limits |= {f"{what}_memory_large_vs_small": BUDGET_MEMORY_RATIO for what in ("perf", "json")}
    return Outcome("export", figures, baseline, ratios, limits=limits).print()


def _run(what: str, database: Path, folder: Path) -> dict[str, float]:
    command = [
        sys.executable,
        "-m",
        "benchmarks.export",
        "--child",
        what,
        str(database),
        str(folder / "out"),
    ]
    result = subprocess.run(command, check=True, capture_output=True, text=True)
    found: dict[str, float] = json.loads(result.stdout)
    return found


def _child(what: str, database: str, directory: str) -> int:
    entries, started = 0, time.perf_counter()
    if what == "dump":
        _dump(Path(database), Path(directory))
    else:
        from tuna.db.engine import make_engine, reading
        from tuna.exports import export
        from tuna.exports.registry import exporters

        exporters()  # imports the libraries: 0.4 s, once in a process, like the imports above
        started = time.perf_counter()
        with reading(make_engine(f"sqlite:///{database}")) as connection:
            entries = export(connection, 1, what, Path(directory)).entries
    seconds = time.perf_counter() - started
    print(json.dumps({"s": seconds, "mib": peak_mib(), "entries": entries}))
    return 0


def _dump(database: Path, directory: Path) -> None:
    directory.mkdir(exist_ok=True)
    with open(directory / "dump.csv", "w", newline="") as stream:
        csv.writer(stream).writerows(sqlite3.connect(database).execute(_DUMP))
        os.fsync(stream.fileno())


def _make(database: Path, layers: int) -> None:
    """Create a session with `layers` layers and the rows of an import and a tuning run."""
    import sqlalchemy as sa

    from tuna.db import configs, models, sessions
    from tuna.db.database import upgrade
    from tuna.db.engine import make_engine, writing
    from tuna.libraries.base import Environment

    engine = make_engine(f"sqlite:///{database}")
    upgrade(engine)
    with writing(engine) as connection:
        environment = Environment("miopen", "3.3.0", "gfx942", 304, "6.2.0")
        session_id, _ = sessions.create(connection, environment, "benchmark")
        facts = {
            "library": "miopen",
            "kinds": "convolution",
            "tunable": True,
            "dynamic": False,
            "valid": True,
        }
        solvers = [facts | {"name": name, "algorithm": family} for name, family in _SOLVERS]
        connection.execute(sa.insert(models.SolverRow), solvers)
    for batch in _layers(layers):
        with writing(engine) as connection:
            ids = configs.store(connection, batch, None).ids
            rows = [row for config_id in ids for row in _rows(session_id, config_id or 0)]
            connection.execute(sa.insert(models.FindDb), rows)
    engine.dispose()


def _layers(count: int) -> Iterator[list[Any]]:
    from tuna.configs import ConvConfig

    for start in range(0, count, _BATCH):
        yield [_layer(ConvConfig, number) for number in range(start, min(count, start + _BATCH))]


def _layer(kind: Any, number: int) -> Any:
    # Distinct layers with sizes typical of real networks.
    channels, size = 8 * (1 + number % 97), 7 + number // 97 % 61
    return kind(1 + number // 5917, channels, size, size, 8 * (1 + number * 7 % 89), 3, 3, 1, 1)


def _rows(session_id: int, config_id: int) -> list[dict[str, Any]]:
    from tuna.db.types import utc_now

    return [
        {
            "session_id": session_id,
            "config_id": config_id,
            "solver_id": solver,
            "time_ms": 0.01 + (config_id * 7919 * solver % 100_003) / 1000,
            "workspace_bytes": config_id * 64 * (solver - 1),
            "params": f"{solver},{config_id % 64},128,128,32,4",
            "source": "benchmark",
            "updated_at": utc_now(),
        }
        for solver in range(1, 1 + len(_SOLVERS))
    ]


if __name__ == "__main__":
    raise SystemExit(main())
