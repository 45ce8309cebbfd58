"""TVM itself reads the TVM database that an export wrote, and finds the checked winner in it."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest
import sqlalchemy as sa
from builders import DRIVERS, DatabaseBuilder

from tuna.db.engine import reading, writing
from tuna.exports import export
from tuna.exports.importer import import_db
from tuna.libraries.tvm import tvm_db

pytest.importorskip("tvm")

#: TVM lives in a process of its own here, as it does everywhere in Tuna.
WRITE = """
import json, sys, tvm
from tvm import te
from tvm.s_tir import meta_schedule as ms
def plain(value):
    if hasattr(value, "items"): return {str(k): plain(v) for k, v in value.items()}
    if isinstance(value, str): return str(value)
    return [plain(v) for v in value] if hasattr(value, "__iter__") else value
x = te.placeholder((8, 8), name="x")
y = te.compute((8, 8), lambda i, j: x[i, j] + 1, name="y")
module = tvm.IRModule({"main": te.create_prim_func([x, y])})
workload = ms.database.Workload(module)
params = []
for factor in (2, 4):
    schedule = tvm.s_tir.Schedule(module)
    loop, _ = schedule.get_loops(schedule.get_sblock("y"))
    schedule.split(loop, [None, factor])
    target = tvm.target.Target({"kind": "llvm"})
    record = ms.database.TuningRecord(schedule.trace, workload, None, target, [])
    params.append(json.dumps(plain(record.as_json())))
print(json.dumps({"workload": json.dumps(plain(workload.as_json())), "params": params}))
"""
READ = """
import json, sys
from tvm.s_tir import meta_schedule as ms
from tvm.target import Target
db = ms.database.JSONDatabase(work_dir=sys.argv[1])
records = list(db.get_all_tuning_records())
module = records[0].workload.mod
best = db.query_tuning_record(module, Target({"kind": "llvm"}), "main")
times = [[float(s) for s in r.run_secs] for r in records]
text = str(db.query_schedule(module, Target({"kind": "llvm"}), "main").mod)
for mcpu, seconds in (("x86-64-v3", 0.001), ("x86-64", 0.0015)):
    target = Target({"kind": "llvm", "mcpu": mcpu})
    db.commit_tuning_record(ms.database.TuningRecord(
        best.trace, best.workload, [seconds, seconds], target, best.args_info))
print(json.dumps([times, float(best.run_secs[0]), "_0 * 4" in text]))
"""


def in_tvm(program: str, *arguments: str) -> object:
    """What the program printed, as JSON."""
    done = subprocess.run(
        [sys.executable, "-c", program, *arguments], capture_output=True, text=True, timeout=200
    )
    assert done.returncode == 0, done.stderr[-2000:]
    return json.loads(done.stdout.splitlines()[-1])


def test_tvm_finds_the_winner_in_an_exported_database_and_what_it_adds_comes_in(
    sqlite_engine: sa.Engine, tmp_path: Path
) -> None:
    with writing(sqlite_engine) as connection:
        path = _exported_to_tvm(DatabaseBuilder(connection), tmp_path)
        target = '{"kind": "llvm", "mcpu": "x86-64"}'
        copy = DatabaseBuilder(connection).session(reason="copy", target=target)
    report = import_db(sqlite_engine, path, copy)
    assert (report.rows, sum(report.skipped.values())) == (1, 3), "two of llvm, one of x86-64-v3"
    with reading(sqlite_engine) as connection:
        path = export(connection, copy, "tvm", tmp_path / "copy").path
    (layer,) = tvm_db.read(path)
    (record,) = layer.records
    assert record.seconds == 0.0015
    assert json.loads(record.schedule)[2]["mcpu"] == "x86-64"


def _exported_to_tvm(build: DatabaseBuilder, tmp_path: Path) -> Path:
    made = in_tvm(WRITE)
    assert isinstance(made, dict)
    session, config, solver = build.session(), build.config(DRIVERS[1]), build.solver("A")
    job = build.job(session, config, solver)
    for number, time_ms in enumerate([3.0, 2.0]):
        build.trial(job, number, time_ms, params=made["params"][number])
    kept = build.kernel(made["workload"].encode())
    build.winner(
        session, config, solver, 2.0, job, trial_number=1, params=made["params"][1], workload=kept
    )
    report = export(build.connection, session, "tvm", tmp_path)
    records, best, scheduled = in_tvm(READ, str(report.path))  # type: ignore[misc]
    assert sorted(records) == [[0.002], [0.003]]
    assert best == 0.002
    assert scheduled
    (layer,) = tvm_db.read(report.path)
    assert json.loads(layer.workload) == json.loads(made["workload"])
    return report.path
