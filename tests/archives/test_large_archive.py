"""A session of a million trials goes to an S3 server and comes back, with kills in between."""

from __future__ import annotations

import os
import random
import signal
import subprocess
import sys
from pathlib import Path

import pytest
import sqlalchemy as sa
from jobs_builder import make_jobs
from private_servers import s3_server, wait_until

from tuna.archives.archive import archive
from tuna.artifacts.files import Folder
from tuna.db import database
from tuna.db.engine import make_engine, reading, writing

_LAYERS, _SOLVERS, _KILLS = 200, 10, 10
_COMMAND_S = 3000.0
_MAX_MIB = 300
#: The command, which writes the bytes of each part that it sends, and at its end its peak memory.
_PROGRAM = """
import sys
from pathlib import Path
from tuna.artifacts.files import Folder
from tuna.cli.main import main
said, write = open(sys.argv.pop(1), "a", buffering=1), Folder.write
def counted(folder, name, data):
    said.write(f"{len(data)}\\n")
    write(folder, name, data)
Folder.write = counted
try:
    main()
finally:
    (line,) = [one for one in Path("/proc/self/status").read_text().splitlines() if "VmHWM" in one]
    print(line.split()[1], flush=True)
"""


def fill(engine: sa.Engine, trials: int) -> int:
    """A session whose jobs have ended, with as many trials and a result for each job."""
    session_id = make_jobs(engine, _LAYERS)
    each = trials // (_LAYERS * _SOLVERS)
    numbers = (
        f"WITH RECURSIVE n(i) AS (SELECT 0 UNION ALL SELECT i + 1 FROM n WHERE i < {each - 1})"
    )
    number, time = "abs(random()) % 64", "abs(random()) / 9.3e18"
    statements = (
        "UPDATE job SET state = 'evaluated', step = 'measure'",
        "INSERT INTO trial (job_id, number, params, artifact, step, cause, output_tail, times_ms,"
        f" time_ms, low_ms, high_ms, build_s, measured_at) {numbers} SELECT job.id, i,"
        f' printf(\'{{"tile": [%d, %d, %d], "unroll": %d}}\', {number}, {number}, {number},'
        f" {number}), lower(hex(randomblob(32))), 'measure', CASE i % 50 WHEN 7 THEN 'run_error'"
        f" END, CASE i % 50 WHEN 7 THEN 'it failed' ELSE '' END,"
        f" printf('[%.6f, %.6f, %.6f]', {time}, {time}, {time}),"
        f" CASE i % 50 WHEN 7 THEN NULL ELSE {time} END, {time}, {time}, {time},"
        " '2026-03-02 09:30:00.000000' FROM n, job",
        "INSERT INTO step_result (job_id, step, attempt, ok, output_tail, worker, device,"
        " started_at, ended_at, busy_s) SELECT id, 'measure', 1, 1, '', 'w', 'd',"
        " '2026-03-02 09:30:00.000000', '2026-03-02 09:30:01.000000', 1.0 FROM job",
        "INSERT INTO find_db (session_id, config_id, solver_id, job_id, trial_number, time_ms,"
        " workspace_bytes, params, algorithm, updated_at) SELECT session_id, config_id, solver_id,"
        " id, 3, 0.5, 0, '{}', '', '2026-03-02 09:30:00.000000' FROM job",
    )
    with writing(engine) as connection:
        for statement in statements:
            connection.exec_driver_sql(statement)
    return session_id


def run(home: Path, sent: Path, *words: str) -> subprocess.Popen[str]:
    env = {name: value for name, value in os.environ.items() if not name.startswith("TUNA_")}
    env |= {"TUNA_HOME": str(home), "TUNA_SIMULATED": "1"}
    return subprocess.Popen(
        [sys.executable, "-c", _PROGRAM, str(sent), *words],
        env=env,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
    )


def done(home: Path, sent: Path, *words: str) -> str:
    """What the command said; its peak memory is within the bound."""
    said, _ = run(home, sent, *words).communicate(timeout=_COMMAND_S)
    *_, peak = said.split()
    print(words[1], f"{int(peak) >> 10} MiB:", said)
    assert int(peak) >> 10 <= _MAX_MIB
    return said


def sizes(sent: Path) -> list[int]:
    return [int(line) for line in sent.read_text().splitlines()]


def counts(engine: sa.Engine) -> dict[str, int]:
    with reading(engine) as connection:
        return {
            name: connection.exec_driver_sql(f"SELECT count(*) FROM {name}").scalar_one()
            for name in ("job", "trial", "find_db", "step_result")
        }


@pytest.mark.drill(only=True)
@pytest.mark.timeout(4 * _COMMAND_S)
@pytest.mark.parametrize("trials", [int(os.environ.get("TUNA_TEST_TRIALS", "1000000"))])
def test_a_million_trials_leave_and_come_back(tmp_path: Path, trials: int) -> None:
    pytest.importorskip("moto")
    pytest.importorskip("s3fs")
    home, other, sent = tmp_path / "home", tmp_path / "other", tmp_path / "sent"
    engines = {}
    for folder in (home, other):
        folder.mkdir(mode=0o700)
        engines[folder] = make_engine(f"sqlite:///{folder / 'tuna.sqlite'}")
        database.upgrade(engines[folder])
    session_id = fill(engines[home], trials)
    before = counts(engines[home])
    assert before["trial"] == trials
    sent.touch()
    chance = random.Random(29)
    with s3_server() as _:
        url, archived = "s3://tuna/one", ("session", "archive", str(session_id), "s3://tuna/one")
        for _ in range(_KILLS):
            there = len(sizes(sent))
            process, more = run(home, sent, *archived), chance.randint(1, 8)
            wait_until(
                lambda one=process, at=there + more: one.poll() or len(sizes(sent)) >= at,
                _COMMAND_S,
                "parts are sent",
            )
            with pytest.raises(subprocess.TimeoutExpired):
                process.wait(chance.random() * 0.1)
            process.send_signal(signal.SIGKILL)
            process.communicate()
        done(home, sent, *archived)
        folder = Folder(url)
        whole = sum(folder.sizes().values())
        print(f"{sum(sizes(sent)) / whole:.3f} of {whole} bytes sent, {len(folder.sizes())} files")
        assert sum(sizes(sent)) <= 1.1 * whole
        done(other, sent, "session", "restore", url)
        for name, at in engines.items():
            archive(at, session_id, tmp_path / f"{name.name}.tuna")
        first, again = ((tmp_path / f"{name}.tuna").read_bytes() for name in ("home", "other"))
        assert first == again
        part = next(name for name in sorted(folder.sizes()) if "-000003-" in name)
        data = folder.read(part)
        pruned = ("session", "prune", str(session_id), "--archived", url)
        folder.remove([part])
        assert f"{part} is missing" in done(home, sent, *pruned).replace("\n", " ")
        assert counts(engines[home]) == before
        folder.write(part, data)
        assert "deleted" in done(home, sent, *pruned)
        left = counts(engines[home])
        assert left | {"trial": 0} == before | {"trial": 0}
        assert left["trial"] <= _LAYERS * _SOLVERS * (20 + 1 + 2)  # of a result, of failures
