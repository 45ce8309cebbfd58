"""Command lines in this process, as in tests/cli, and pieces of code in a process of little memory."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import click
import pytest

from tuna.cli.main import guarded, tuna
from tuna.cli.seeds import export_db, go_fish, load_job

PROGRAMS: dict[str, click.Command] = {
    "tuna": tuna,
    "go_fish": go_fish.go_fish,
    "load_job": load_job.load_job,
    "export_db": export_db.export_db,
}
_PRELUDE = """\
import resource, sys
limit = int(sys.argv.pop(1))
resource.setrlimit(resource.RLIMIT_AS, (limit, limit))
from pathlib import Path
from tuna.errors import BadInput, TunaError
"""


@dataclass(frozen=True)
class Ended:
    """How a command line ended."""

    code: int
    out: str
    err: str


@pytest.fixture()
def home(tuna_home: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """An empty TUNA_HOME, and the folder above it as the current one."""
    monkeypatch.chdir(tmp_path)
    return tuna_home


@pytest.fixture()
def type_in(home: Path, capsys: pytest.CaptureFixture[str]) -> Callable[..., Ended]:
    """`type_in("tuna", "status")` or `type_in("go_fish", "noop", "--init_session", ...)`."""

    def run(program: str, *words: object) -> Ended:
        capsys.readouterr()
        code = guarded(PROGRAMS[program], [str(word) for word in words], name=program)
        captured = capsys.readouterr()
        return Ended(code, captured.out, captured.err)

    return run


@pytest.fixture()
def in_little_memory(tmp_path: Path) -> Callable[..., str]:
    """`in_little_memory(code, *arguments)`: what the code prints in a process that may have 700 MiB of address space."""

    def run(code: str, *arguments: object, megabytes: int = 700) -> str:
        words = [sys.executable, "-c", _PRELUDE + code, str(megabytes << 20), *map(str, arguments)]
        env = {**os.environ, "TUNA_HOME": str(tmp_path / "home"), "OPENBLAS_NUM_THREADS": "1"}
        done = subprocess.run(words, cwd=tmp_path, env=env, capture_output=True, text=True, timeout=60, check=False)
        assert done.returncode == 0, done.stderr[-2000:]
        assert "Traceback" not in done.stderr
        return done.stdout

    return run
