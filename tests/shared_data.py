"""What tests need that is not in the repository: services, and MIOpen's real commands, exchanges
and databases."""

from __future__ import annotations

import os
import re
from pathlib import Path

import pytest
from private_servers import find

#: How long the drills are: 1 keeps the suite short, 3 runs three seeds of faults, thousands of
#: jobs, and every variant of what takes seconds (`pytest.mark.drill(only=True)`).
DRILLS = int(os.environ.get("TUNA_TEST_DRILLS") or 1)


def need(there: object, what: str) -> None:
    """Skip at home, fail in CI, when something that a test needs is not there."""
    if not there:
        (pytest.fail if os.environ.get("CI") == "true" else pytest.skip)(f"{what} is not here")


_ROOT = Path(__file__).parents[1]
#: Programs that tests start: those for which scripts/test installs Debian's packages.
PROGRAMS = frozenset(
    word
    for words in re.findall(
        r"\bprograms\+?=\((.*?)\)", (_ROOT / "scripts" / "test").read_text(), re.DOTALL
    )
    for word in words.split()
)


def needed_program(name: str) -> str:
    """Return the path of a program, by `need`; a LookupError if scripts/test does not install
    it."""
    if name not in PROGRAMS:
        raise LookupError(f"{name} is not among the programs that scripts/test installs")
    path = find(name)
    need(path, f"{name} (scripts/programs {name})")
    return str(path)


def shared_data(*parts: str) -> Path:
    """A file or folder in TUNA_TEST_DATA, else in shared/data beside the repository."""
    beside = Path(__file__).resolve().parents[2] / "shared" / "data"
    path = Path(os.environ.get("TUNA_TEST_DATA") or beside).joinpath(*parts)
    need(path.exists(), f"{path} (set TUNA_TEST_DATA to a copy of the data that tests use)")
    return path
