"""The main job for a GPU, small: Triton's real compiler, real workers, and a stand-in of NVIDIA's
driver that multiplies what the kernels should multiply."""

from __future__ import annotations

import contextlib
import json
import random
import sqlite3
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path

import psutil
import pytest
from cuda_double.stand_in import install

pytest.importorskip("triton", reason="needs the extra `triton`")

#: Of a search, and of each of its rounds.
CANDIDATES, BATCH = 4, 2
#: The arguments of Tuna's own product where no size is 1, and no stride but those within a row.
SCRIPT = (
    "name=gemm params=8,8,8,4,4,4,4,4,4,8,8 run=product_fp16 time_us=8 block_us=0.5 spread=0.01"
)


@pytest.fixture
def tuna(home: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Callable[..., str]:
    """`tuna("status", "--json")`: what the command prints beside the stand-in."""
    driver = install(tmp_path / "driver")
    (driver / "script").write_text(SCRIPT)
    monkeypatch.setenv("LD_LIBRARY_PATH", str(driver))
    monkeypatch.setenv("TUNA_HOME", str(home))

    def run(*words: str) -> str:
        command = [sys.executable, "-m", "tuna", *words]
        done = subprocess.run(
            command, cwd=tmp_path, capture_output=True, text=True, timeout=250, check=False
        )
        assert done.returncode == 0, done.stdout + done.stderr
        return done.stdout

    return run


def load(tuna: Callable[..., str], folder: Path, *rows: int) -> None:
    """A session with a product of each number of rows."""
    lines = [f"MIOpenDriver gemmfp16 -m {row} -n 80 -k 64\n" for row in rows]
    (folder / "layers.txt").write_text("".join(lines))
    for words in (
        "init-session triton -l first",
        "import layers.txt -t mine",
        "update-solvers triton",
        "applicability --session-id 1",
        f"load-jobs --session-id 1 -t mine --candidates {CANDIDATES} --option batch={BATCH}",
    ):
        tuna(*words.split())


@pytest.mark.service
def test_a_product_is_compiled_measured_and_stored(
    home: Path, tmp_path: Path, tuna: Callable[..., str]
) -> None:
    load(tuna, tmp_path, 96)
    tuna("run", "--session-id", "1")
    (status,) = json.loads(tuna("status", "--json"))
    assert (set(status["jobs"]), status["failures"]) == ({"evaluated"}, [])
    with sqlite3.connect(home / "tuna.sqlite") as connection:
        trials = connection.execute("SELECT time_ms, max_error, cause FROM trial").fetchall()
        first = "SELECT search_id, round, params FROM job JOIN trial ON job_id = job.id"
        tried = connection.execute(f"{first} ORDER BY search_id IS NULL, round, number").fetchall()
        best = connection.execute(
            "SELECT solver.name, find_db.params, find_db.time_ms FROM find_db"
            " JOIN solver ON solver.id = find_db.solver_id ORDER BY find_db.time_ms"
        ).fetchall()
        devices = connection.execute("SELECT name, peak_source FROM device").fetchall()
        (environment,) = connection.execute("SELECT arch, num_cu, device FROM environment")
    assert all(cause is None and error < 2e-3 for _, error, cause in trials), trials
    assert len(trials) >= CANDIDATES + 1  # and the consumer's default
    # which has the build key of the first candidate
    assert len([*(home / "artifacts").rglob("*.build")]) == CANDIDATES
    *searched, (no_search, _, default) = tried
    assert [number for search, number, _ in searched if search] == [0, 0, 1, 1]
    assert (no_search, searched[0][2]) == (None, default)
    assert {name for name, _, _ in best} == {"TritonGemm", "TritonGemmDefault"}
    assert 0.008 < best[0][2] < 0.1
    assert set(json.loads(best[0][1])) >= {"BLOCK_SIZE_M", "num_warps"}
    name = "NVIDIA Fake H100 80GB HBM3"
    assert environment == ("sm_90", 132, name)
    assert devices == [(name, "device")]


@pytest.mark.service
@pytest.mark.drill(only=True)
@pytest.mark.timeout(1200)
def test_no_result_is_lost_when_processes_are_killed(
    home: Path, tmp_path: Path, tuna: Callable[..., str]
) -> None:
    """Ten times one process of the run, whichever it is; a run that ends is started again."""
    load(tuna, tmp_path, *(96 * (1 + number) for number in range(8)))
    generator, kept, killed = random.Random(7), set[tuple[int, float]](), list[str]()

    def results() -> set[tuple[int, float]]:
        with contextlib.closing(sqlite3.connect(home / "tuna.sqlite")) as connection:
            done = connection.execute("SELECT id, time_ms FROM trial WHERE time_ms IS NOT NULL")
            return set(done.fetchall())

    run = psutil.Popen([sys.executable, "-m", "tuna", "run", "--session-id", "1"], cwd=tmp_path)
    for _ in range(10):
        time.sleep(generator.uniform(2, 6))
        if run.poll() is not None:
            run = psutil.Popen(
                [sys.executable, "-m", "tuna", "run", "--session-id", "1"], cwd=tmp_path
            )
            time.sleep(4)
        with contextlib.suppress(psutil.Error):
            victim = generator.choice([run, *run.children(recursive=True)])
            killed.append(" ".join(victim.cmdline())[-60:])
            victim.kill()
        now = results()
        assert {one for one, _ in kept} <= {one for one, _ in now}
        kept = now
    run.kill()
    run.wait()
    tuna("run", "--session-id", "1")
    (status,) = json.loads(tuna("status", "--json"))
    assert set(status["jobs"]) == {"evaluated"}, killed
    assert {one for one, _ in kept} <= {one for one, _ in results()}
    with contextlib.closing(sqlite3.connect(home / "tuna.sqlite")) as connection:
        (found,) = connection.execute("SELECT count(*) FROM find_db").fetchone()
    assert found == 8 * 2
