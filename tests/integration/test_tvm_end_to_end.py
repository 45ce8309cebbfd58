"""The main job, small: real layers, real TVM, real Celery workers, from driver commands to a
database that TVM loads."""

from __future__ import annotations

import json
import os
import sqlite3
import subprocess
import sys
from collections.abc import Callable
from importlib.util import find_spec
from pathlib import Path

import pytest
from command_lines import Ended
from shared_data import DRILLS, need, needed_program

ROOT = Path(__file__).parent.parent.parent
LAYERS = """\
./bin/MIOpenDriver conv -n 1 -c 16 -H 10 -W 10 -k 16 -y 3 -x 3 -p 1 -q 1 -u 2 -v 2 -F 1
./bin/MIOpenDriver gemm -m 32 -n 48 -k 16
"""
CANDIDATES = DRILLS
#: The tile for each layer, and each untuned; the stride leaves out Winograd, which
#: test_tvm_families.py measures.
JOBS = 2 + 2
TRIALS = 2 * CANDIDATES + 2


def _run(home: Path, *words: str | Path) -> subprocess.CompletedProcess[str]:
    env = {**os.environ, "TUNA_HOME": str(home)}
    done = subprocess.run(
        [str(word) for word in words],
        cwd=home.parent,
        env=env,
        capture_output=True,
        text=True,
        timeout=280,
        check=False,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    return done


@pytest.mark.usefixtures("forked", "quick_timing")
def test_layers_are_tuned_exported_and_used_by_plain_tvm(
    home: Path, type_in: Callable[..., Ended], tmp_path: Path
) -> None:
    need(find_spec("tvm"), "TVM")
    needed_program("g++")
    (tmp_path / "layers.txt").write_text(LAYERS)

    def good(program: str, *words: str) -> str:
        ended = type_in(program, *words)
        assert ended.code == 0, ended
        return ended.out

    good("go_fish", "tvm", "--init_session", "-l", "test")
    good("go_fish", "tvm", "import_configs", "-t", "small", "-f", "layers.txt")
    good("go_fish", "tvm", "--update_solvers")
    good("go_fish", "tvm", "--update_applicability", "--session_id", "1")
    steps = ("--fin_steps", "compile,eval", "--candidates", str(CANDIDATES))
    loaded = good("load_job", "--session_id", "1", "-t", "small", *steps, "-o", "-l", "test")
    assert loaded == f"New jobs added: {JOBS}\n"
    _run(home, sys.executable, ROOT / "go_fish.py", "tvm", "--session_id", "1", "--execute")

    status = json.loads(good("tuna", "status", "--json"))[0]
    assert set(status["jobs"]) == {"evaluated"}
    assert status["failures"] == []
    with sqlite3.connect(home / "tuna.sqlite") as connection:
        trials = connection.execute(
            "SELECT count(*), count(time_ms), max(max_error) FROM trial"
        ).fetchone()
        finals = connection.execute("SELECT count(*) FROM job WHERE steps = 'finals'").fetchone()[0]
    assert status["jobs"]["evaluated"] - finals == JOBS  # finals are only where solvers come close
    assert trials[:2] == (TRIALS, TRIALS)
    assert 0 < trials[2] < 1e-4

    before = (home / "tuna.sqlite").stat().st_mtime_ns
    good("tuna", "run", "--session-id", "1")
    assert (home / "tuna.sqlite").stat().st_mtime_ns == before, (
        "a second run measured something again"
    )

    paths = [
        Path(good("export_db", "--session_id", "1", flag).splitlines()[-1])
        for flag in ("-p", "-f", "-k")
    ]
    assert [path.suffixes[-1] for path in paths] == [".db", ".txt", ".kdb"]
    folder = Path(good("export_db", "--session_id", "1", "--tvm_db").splitlines()[-1])
    # The folder above is what `tuna tune -o` is given.
    used = _run(home, sys.executable, ROOT / "examples" / "use_exported_db.py", folder.parent)
    assert len(used.stdout.splitlines()) == 1 + 2
    assert "WRONG" not in used.stdout
    page = good("tuna", "report", "--session-id", "1", "-o", "report.html")
    assert "TvmGemmTile" in Path(page.splitlines()[-1]).read_text()
