"""The main job for a GPU, small: Triton's real compiler, real workers, and a stand-in of NVIDIA's
driver that multiplies what the kernels should multiply."""

from __future__ import annotations

import json
import os
import sqlite3
import subprocess
import sys
from pathlib import Path

import pytest
from cuda_double.stand_in import install

pytest.importorskip("triton", reason="needs the extra `triton`")

CANDIDATES = 4
#: The arguments of Tuna's own product where no size is 1, and no stride but those within a row.
SCRIPT = (
    "name=gemm params=8,8,8,4,4,4,4,4,4,8,8 run=product_fp16 time_us=8 block_us=0.5 spread=0.01"
)


@pytest.mark.service
def test_a_product_is_compiled_measured_and_stored(
    home: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    driver = install(tmp_path / "driver")
    (driver / "script").write_text(SCRIPT)
    monkeypatch.setenv("LD_LIBRARY_PATH", str(driver))
    (tmp_path / "layers.txt").write_text("MIOpenDriver gemmfp16 -m 96 -n 80 -k 64\n")

    def tuna(*words: str) -> str:
        done = subprocess.run(
            [sys.executable, "-m", "tuna", *words],
            cwd=tmp_path,
            env={**os.environ, "TUNA_HOME": str(home)},
            capture_output=True,
            text=True,
            timeout=250,
            check=False,
        )
        assert done.returncode == 0, done.stdout + done.stderr
        return done.stdout

    for words in (
        "init-session triton -l first",
        "import layers.txt -t mine",
        "update-solvers triton",
        "applicability --session-id 1",
        f"load-jobs --session-id 1 -t mine --candidates {CANDIDATES}",
        "run --session-id 1",
    ):
        tuna(*words.split())
    (status,) = json.loads(tuna("status", "--json"))
    assert (set(status["jobs"]), status["failures"]) == ({"evaluated"}, [])
    with sqlite3.connect(home / "tuna.sqlite") as connection:
        trials = connection.execute("SELECT time_ms, max_error, cause FROM trial").fetchall()
        best = connection.execute(
            "SELECT solver.name, find_db.params, find_db.time_ms FROM find_db"
            " JOIN solver ON solver.id = find_db.solver_id ORDER BY find_db.time_ms"
        ).fetchall()
        devices = connection.execute("SELECT name, peak_source FROM device").fetchall()
        (environment,) = connection.execute("SELECT arch, num_cu, device FROM environment")
    assert all(cause is None and error < 2e-3 for _, error, cause in trials), trials
    assert len(trials) >= CANDIDATES + 1  # and the consumer's default
    assert {name for name, _, _ in best} == {"TritonGemm", "TritonGemmDefault"}
    assert 0.008 < best[0][2] < 0.1
    assert set(json.loads(best[0][1])) >= {"BLOCK_SIZE_M", "num_warps"}
    name = "NVIDIA Fake H100 80GB HBM3"
    assert environment == ("sm_90", 132, name)
    assert devices == [(name, "device")]
