"""examples/plugin, installed as a stranger would install it: its contract, real workers, the
report, the export."""

from __future__ import annotations

import json
import os
import re
import sqlite3
from collections.abc import Callable
from pathlib import Path

import pytest
from command_lines import Ended

ROOT = Path(__file__).resolve().parents[2]
PLUGIN = ROOT / "examples" / "plugin"
LAYERS = "MIOpenDriver gemm -m 32 -n 48 -k 40\nMIOpenDriver gemm -m 8 -n 8 -k 8 --transA 1\n"
CANDIDATES = 3


@pytest.fixture(scope="module")
def installed(install_package: Callable[[Path], Path]) -> Path:
    """The folder of the installed package."""
    return install_package(PLUGIN)


@pytest.fixture
def site(installed: Path, home: Path, quick_timing: None, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The package is installed for this process and all that it starts."""
    monkeypatch.setenv("PYTHONPATH", str(installed / "site"), prepend=os.pathsep)
    monkeypatch.syspath_prepend(installed / "site")
    return installed / "site"


def test_the_example_has_at_most_150_lines_of_python() -> None:
    lines = {
        path: len(path.read_text().splitlines())
        for path in PLUGIN.rglob("*.py")
        if "build" not in path.relative_to(ROOT).parts
    }
    assert len(lines) == 4
    assert sum(lines.values()) <= 150, lines


def test_its_own_tests_run_the_contract(
    installed: Path, site: Path, run_module: Callable[..., str]
) -> None:
    printed = run_module(installed / "source", "pytest", "-q", "-p", "no:cacheprovider", "tests")
    found = re.search(r"(\d+) passed", printed.splitlines()[-1])
    assert found, printed
    assert int(found[1]) >= 30
    assert "skipped" not in printed


@pytest.mark.drill(only=True)  # test_own_kind.py shows it of another plug-in
def test_the_example_is_tuned_by_real_workers_reported_and_exported(
    site: Path,
    home: Path,
    type_in: Callable[..., Ended],
    run_module: Callable[..., str],
    check_generic_export: Callable[[str], None],
    tmp_path: Path,
) -> None:
    (tmp_path / "layers.txt").write_text(LAYERS)
    for words in (
        "init-session cgemm -l first",
        "import layers.txt -t mine",
        "update-solvers cgemm",
        "applicability --session-id 1",
        f"load-jobs --session-id 1 -t mine --candidates {CANDIDATES}",
    ):
        ended = type_in("tuna", *words.split())
        assert ended.code == 0, ended
    run_module(tmp_path, "tuna", "run", "--session-id", "1")
    (status,) = json.loads(type_in("tuna", "status", "--json").out)
    assert (status["jobs"], status["failures"]) == ({"evaluated": 1}, [])
    with sqlite3.connect(home / "tuna.sqlite") as connection:
        trials = connection.execute(
            "SELECT params, time_ms, max_error, cause FROM trial"
        ).fetchall()
        ((best_params, best_ms),) = connection.execute(
            "SELECT params, time_ms FROM find_db"
        ).fetchall()
    assert len(trials) == CANDIDATES
    assert all(
        cause is None and time_ms > 0 and error < 1e-4 for _, time_ms, error, cause in trials
    )
    assert (best_params, best_ms) in {(params, time_ms) for params, time_ms, _, _ in trials}
    assert set(json.loads(best_params)) == {"tile", "unroll"}
    assert type_in("tuna", "report", "--session-id", "1", "-o", "report.html").code == 0
    assert "CGemmTiled" in (tmp_path / "report.html").read_text()
    check_generic_export("CGemmTiled")
