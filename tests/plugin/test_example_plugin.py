"""examples/plugin, installed as a stranger would install it: its contract, real workers, the
report, the export."""

from __future__ import annotations

import os
import re
from collections.abc import Callable
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
PLUGIN = ROOT / "examples" / "plugin"


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
