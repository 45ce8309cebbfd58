"""Pieces of code in a process of little memory."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest

_PRELUDE = """\
import resource, sys
limit = int(sys.argv.pop(1))
resource.setrlimit(resource.RLIMIT_AS, (limit, limit))
from pathlib import Path
from tuna.errors import BadInput, TunaError
"""


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
