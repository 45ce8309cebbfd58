"""What only pretends to measure needs an explicit switch, and its results are marked and never
released."""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest
import sqlalchemy as sa
from command_lines import Ended

from tuna.db.engine import make_engine
from tuna.errors import LibraryMissing, NotFound
from tuna.libraries import registry
from tuna.libraries.miopen.library import MiopenLibrary
from tuna.settings import get_settings


@pytest.fixture()
def without_switch(home: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("TUNA_SIMULATED")
    get_settings.cache_clear()
    registry.get_library.cache_clear()


def test_the_library_that_does_nothing_is_not_offered(without_switch: None) -> None:
    assert "noop" not in registry.names()
    assert {"example", "miopen", "tvm"} <= set(registry.names())
    with pytest.raises(NotFound, match="only pretends") as error:
        registry.get_library("noop")
    assert "TUNA_SIMULATED=1" in error.value.hint


def test_the_stand_in_for_fin_is_refused_without_the_switch(
    rocm: Callable[..., Path], home: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    rocm(marked=True)
    assert MiopenLibrary().toolchain()
    monkeypatch.delenv("TUNA_SIMULATED")
    get_settings.cache_clear()
    with pytest.raises(LibraryMissing, match="only pretends") as error:
        MiopenLibrary().toolchain()
    assert "TUNA_SIMULATED=1" in error.value.hint


@pytest.mark.usefixtures("forked")
def test_the_stand_in_s_results_are_marked_and_golden_refuses_them(
    rocm: Callable[..., Path], type_in: Callable[..., Ended], tmp_path: Path
) -> None:
    rocm(marked=True)
    layers = tmp_path / "layers.txt"
    layers.write_text("./bin/MIOpenDriver conv -n 4 -c 16 -H 14 -W 14 -k 16 -y 1 -x 1 -F 1\n")
    for words in (
        ("init-session", "miopen", "-l", "why"),
        ("import", layers, "-t", "t"),
        ("update-solvers", "miopen"),
        ("applicability", "--session-id", 1),
        (
            "load-jobs",
            "--session-id",
            1,
            "-t",
            "t",
            "-l",
            "why",
            "--steps",
            "miopen_find_compile,miopen_find_eval",
        ),
    ):
        done = type_in("tuna", *words)
        assert done.code == 0, done
    # A process has one broker, that of its first Celery app.
    ran = subprocess.run(
        [sys.executable, "-m", "tuna", "run", "--session-id", "1"], capture_output=True, text=True
    )
    assert ran.returncode == 0, ran.stderr
    engine = make_engine(get_settings().sql_url)
    with engine.connect() as connection:
        marks = (
            connection.execute(sa.text("SELECT DISTINCT simulated FROM find_db")).scalars().all()
        )
    engine.dispose()
    assert marks == [1]
    assert json.loads(type_in("tuna", "status", "--json").out)[0]["simulated"] is True
    assert "miopen (simulated)" in type_in("tuna", "status").out
    exported = type_in("tuna", "export", "--session-id", 1, "--form", "find", "-d", tmp_path)
    assert "timed by a stand-in" in exported.err
    assert type_in("tuna", "export", "--session-id", 1, "--form", "json", "-d", tmp_path).code == 0
    (lines,) = tmp_path.glob("*.jsonl")
    assert '"simulated":true' in lines.read_text().replace(" ", "")
    report = type_in("tuna", "report", "--session-id", 1, "-o", tmp_path / "report.html")
    assert report.code == 0
    assert (
        "Simulated: these times do not come from a device."
        in (tmp_path / "report.html").read_text()
    )
    refused = type_in("tuna", "golden", "build", "1", "--session-id", 1)
    assert refused.code != 0
    assert "timed by a stand-in" in refused.err
