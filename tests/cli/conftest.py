"""Runs command lines in this process, each test in a TUNA_HOME of its own."""

from __future__ import annotations

import os
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import click
import pytest

from tuna.cli.main import guarded, tuna
from tuna.cli.seeds import export_db, go_fish, load_job
from tuna.settings import get_settings

LAYERS = """\
# two layers
./bin/MIOpenDriver conv -n 1 -c 8 -H 8 -W 8 -k 8 -y 3 -x 3 -p 1 -q 1 -F 1
./bin/MIOpenDriver conv -n 1 -c 8 -H 8 -W 8 -k 16 -y 1 -x 1 -F 1
"""


@dataclass(frozen=True)
class Ended:
    """How a command line ended."""

    code: int
    out: str
    err: str


@pytest.fixture
def home(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """An empty TUNA_HOME, and no other setting."""
    for name in [name for name in os.environ if name.startswith(("TUNA_", "CELERY_")) and name != "TUNA_TEST_DATA"]:
        monkeypatch.delenv(name)
    monkeypatch.setenv("TUNA_HOME", str(tmp_path / "home"))
    monkeypatch.chdir(tmp_path)
    get_settings.cache_clear()
    yield tmp_path / "home"
    get_settings.cache_clear()


@pytest.fixture
def type_in(home: Path, capsys: pytest.CaptureFixture[str]) -> Callable[..., Ended]:
    """`type_in("tuna", "status")` or `type_in("go_fish", "noop", "--init_session", ...)`."""
    programs: dict[str, click.Command] = {
        "tuna": tuna,
        "go_fish": go_fish.go_fish,
        "load_job": load_job.load_job,
        "export_db": export_db.export_db,
    }

    def run(program: str, *words: object) -> Ended:
        capsys.readouterr()
        code = guarded(programs[program], [str(word) for word in words], name=program)
        captured = capsys.readouterr()
        return Ended(code, captured.out, captured.err)

    return run


@pytest.fixture
def layers(tmp_path: Path) -> Path:
    """A file with two layers."""
    path = tmp_path / "layers.txt"
    path.write_text(LAYERS)
    return path


@pytest.fixture
def loaded(type_in: Callable[..., Ended], layers: Path) -> Callable[..., Ended]:
    """A session of the library that does nothing, with 20 jobs."""
    for words in (
        ("go_fish", "noop", "--init_session", "-l", "test"),
        ("go_fish", "noop", "import_configs", "-t", "small", "-f", layers),
        ("go_fish", "noop", "--update_solvers"),
        ("go_fish", "noop", "--update_applicability", "--session_id", 1),
        ("load_job", "--session_id", 1, "-t", "small", "--fin_steps", "build,measure", "-o", "-l", "test"),
    ):
        ended = type_in(*words)
        assert ended.code == 0, ended
    return type_in
