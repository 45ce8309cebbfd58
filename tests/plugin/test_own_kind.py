"""A kind of config and its library that Tuna has never heard of: imported, tuned by real workers,
reported, exported."""

from __future__ import annotations

import json
import os
import sqlite3
from collections.abc import Callable
from pathlib import Path

import pytest
from command_lines import Ended

SOFTMAX = Path(__file__).parent / "softmax"

pytest.importorskip("tuna.configs.kind", reason="kinds are not registered yet")


@pytest.mark.usefixtures("forked", "quick_timing")
def test_a_kind_of_its_own_goes_the_whole_way(
    install_package: Callable[[Path], Path],
    home: Path,
    type_in: Callable[..., Ended],
    run_module: Callable[..., str],
    check_generic_export: Callable[[str], None],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    site = install_package(SOFTMAX) / "site"
    monkeypatch.setenv("PYTHONPATH", str(site), prepend=os.pathsep)
    monkeypatch.syspath_prepend(site)
    (tmp_path / "layers.txt").write_text(
        json.dumps({"kind": "softmax", "rows": 64, "cols": 100}) + "\n"
    )
    # Not in this process, which has looked for plug-ins before, but in one alone: Python takes its
    # time to start.
    run_module(
        tmp_path,
        "-c",
        "import sys; from tuna.cli.main import guarded, tuna; "
        "sys.exit(max(guarded(tuna, line.split()) for line in sys.argv[1:]))",
        "init-session csoftmax -l first",
        "import layers.txt -t mine",
        "update-solvers csoftmax",
        "applicability --session-id 1",
        "load-jobs --session-id 1 -t mine --candidates 2",
        "run --session-id 1",
        "report --session-id 1 -o report.html",
    )
    with sqlite3.connect(home / "tuna.sqlite") as connection:
        trials = connection.execute(
            "SELECT params, time_ms, max_error, cause FROM trial"
        ).fetchall()
        ((best, best_ms),) = connection.execute("SELECT params, time_ms FROM find_db").fetchall()
    assert sorted(params for params, *_ in trials) == ["1", "2"]
    assert all(
        cause is None and time_ms > 0 and error < 1e-5 for _, time_ms, error, cause in trials
    )
    assert (best, best_ms) in {(params, time_ms) for params, time_ms, _, _ in trials}
    assert "softmax 64x100" in (tmp_path / "report.html").read_text()
    check_generic_export("CSoftmaxRows")
