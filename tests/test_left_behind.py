"""A test that leaves a process behind fails, whatever the process did to hide."""

from __future__ import annotations

from pathlib import Path

import pytest

pytestmark = pytest.mark.service

pytest_plugins = ["pytester"]
_CONFTEST = """
import subprocess, sys
import pytest
from left_behind import LeftBehind
import left_behind
left_behind._GRACE_S = 0.2

def pytest_configure(config):
    config.pluginmanager.register(LeftBehind(config))

def start(*words, **options):
    return subprocess.Popen(["sleep", *words], start_new_session=True, **options)
"""


@pytest.fixture(autouse=True)
def _without_other_plugins(monkeypatch: pytest.MonkeyPatch) -> None:
    """They take most of the time of a start."""
    monkeypatch.setenv("PYTEST_DISABLE_PLUGIN_AUTOLOAD", "1")


def _prepare(pytester: pytest.Pytester) -> None:
    pytester.makeconftest(_CONFTEST)
    pytester.makeini(f"[pytest]\npythonpath = {Path(__file__).parent}\nmarkers = keeps_processes\n")


def test_a_process_that_is_left_is_named_and_ended(pytester: pytest.Pytester) -> None:
    _prepare(pytester)
    pytester.makepyfile("""
        import os, subprocess
        from conftest import start

        def test_child(): start("51")
        def test_without_the_mark(): start("52", env={"PATH": os.environ["PATH"]})
        def test_without_its_parent(): subprocess.run(["sh", "-c", "sleep 53 & exit"])
        def test_without_both(tmp_path):
            subprocess.run(["sh", "-c", "env -i sleep 54 & exit"], cwd=tmp_path)
    """)
    result = pytester.runpytest_subprocess()
    result.assert_outcomes(passed=4, errors=4)
    left = [r".*processes were left behind", r" +\d+: sleep {}"]
    result.stdout.re_match_lines([line.format(51 + n) for n in range(4) for line in left])
