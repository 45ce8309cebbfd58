"""Logs of all trials: one file for each job, at any URL; what cannot be written waits."""

from __future__ import annotations

import gzip
import json
from pathlib import Path
from typing import Any

import fsspec
import pytest
import sqlalchemy as sa
from jobs_builder import make_jobs

from tuna.db.engine import writing
from tuna.db.models import Job, TrialRow
from tuna.errors import BadInput, ServiceError
from tuna.libraries.base import FINALS
from tuna_remote import trial_logs
from tuna_remote.trial_logs import TrialLogs


def end(engine: sa.Engine, job_id: int, time_ms: float = 1.5, **values: Any) -> None:
    """End a job with two trials."""
    with writing(engine) as connection:
        connection.execute(
            sa.update(Job).where(Job.id == job_id).values(state="evaluated", **values)
        )
        row = {"job_id": job_id, "output_tail": "", "step": "measure"}
        good = {"number": 0, "params": "{}", "time_ms": time_ms, "times_ms": "[1.5, 1.6]"}
        bad = {"number": 1, "params": "[]", "cause": "build_error", "times_ms": "[]"}
        connection.execute(sa.insert(TrialRow).values(**row, **good))
        connection.execute(sa.insert(TrialRow).values(**row, **bad))


def lines(data: bytes) -> list[dict[str, Any]]:
    return [json.loads(line) for line in gzip.decompress(data).splitlines()]


def test_each_job_that_has_ended_has_a_file(sqlite_engine: sa.Engine, tmp_path: Path) -> None:
    session_id = make_jobs(sqlite_engine, 1, solvers=("Noop1", "Noop2"))
    logs = TrialLogs(sqlite_engine, session_id, str(tmp_path / "logs"), "llvm -mcpu=znver4")
    assert logs.url == f"{tmp_path}/logs/llvm_-mcpu=znver4"
    end(sqlite_engine, 1)
    logs.write([1, 2])
    (path,) = Path(logs.url).iterdir()
    assert path.name.endswith("-Noop1.jsonl.gz")
    assert len(path.name) == 64 + len("-Noop1.jsonl.gz")
    first, second = lines(path.read_bytes())
    assert (first["solver"], first["number"], first["times_ms"], first["config"]["kind"]) == (
        "Noop1",
        0,
        [1.5, 1.6],
        "gemm",
    )
    assert (second["cause"], second["time_ms"]) == ("build_error", None)
    end(sqlite_engine, 2)
    before = path.read_bytes()
    again = TrialLogs(sqlite_engine, session_id, str(tmp_path / "logs"), "llvm -mcpu=znver4")
    again.begin()  # what a killed master did not write
    again.finish()
    assert len(list(Path(logs.url).iterdir())) == 2
    assert path.read_bytes() == before


def test_jobs_of_one_layer_and_solver_have_one_file(
    sqlite_engine: sa.Engine, tmp_path: Path
) -> None:
    """Such as a random search, and later one that learns."""
    session_id = make_jobs(sqlite_engine, 1, solvers=("Noop1",))
    make_jobs(sqlite_engine, 1, solvers=("Noop1",), steps="measure")
    logs = TrialLogs(sqlite_engine, session_id, str(tmp_path), "llvm")
    end(sqlite_engine, 1, 1.0)
    end(sqlite_engine, 2, 2.0)
    logs.write([1, 2])
    (path,) = (tmp_path / "llvm").iterdir()
    assert [line["time_ms"] for line in lines(path.read_bytes()) if line["time_ms"]] == [1.0, 2.0]


def test_finals_change_the_logs_of_their_layer(sqlite_engine: sa.Engine, tmp_path: Path) -> None:
    session_id = make_jobs(sqlite_engine, 1, solvers=("Noop1", "Noop2"))
    logs = TrialLogs(sqlite_engine, session_id, str(tmp_path), "llvm")
    end(sqlite_engine, 1)
    logs.write([1])
    with writing(sqlite_engine) as connection:
        connection.execute(sa.update(TrialRow).values(time_ms=9.0))
        connection.execute(
            sa.update(Job).where(Job.id == 2).values(state="evaluated", steps=FINALS, step=FINALS)
        )
    logs.write([2])
    (path,) = (tmp_path / "llvm").iterdir()
    assert lines(path.read_bytes())[0]["time_ms"] == 9.0


def test_what_cannot_be_written_waits(
    sqlite_engine: sa.Engine, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    session_id = make_jobs(sqlite_engine, 1, solvers=("Noop1",))
    end(sqlite_engine, 1)
    (tmp_path / "blocked").write_text("a file where the folder would be")
    logs = TrialLogs(sqlite_engine, session_id, str(tmp_path / "blocked"), "llvm")
    logs.write([1])  # is no error yet
    with pytest.raises(ServiceError, match="cannot be written"):
        logs.finish()
    (tmp_path / "blocked").unlink()
    logs.flush()
    assert not (tmp_path / "blocked").exists(), "the place is not asked all the time"
    monkeypatch.setattr(trial_logs, "_AGAIN_S", 0.0)
    logs.finish()
    assert len(list((tmp_path / "blocked" / "llvm").iterdir())) == 1


def test_any_url_of_fsspec(sqlite_engine: sa.Engine) -> None:
    session_id = make_jobs(sqlite_engine, 1, solvers=("Noop1",))
    end(sqlite_engine, 1)
    logs = TrialLogs(sqlite_engine, session_id, "memory://bucket/logs", "llvm")
    logs.begin()
    logs.finish()
    files = fsspec.filesystem("memory")
    assert len(lines(files.cat_file(files.ls("/bucket/logs/llvm", detail=False)[0]))) == 2
    with pytest.raises(BadInput, match="Protocol not known"):
        TrialLogs(sqlite_engine, session_id, "nothing://user:secret@there", "llvm")
    with pytest.raises(BadInput) as raised:
        TrialLogs(sqlite_engine, session_id, "nothing://user:secret@there", "llvm")
    assert "secret" not in str(raised.value)
