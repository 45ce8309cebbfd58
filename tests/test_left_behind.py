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


def _prepare(pytester: pytest.Pytester) -> None:
    pytester.makeconftest(_CONFTEST)
    pytester.makeini(f"[pytest]\npythonpath = {Path(__file__).parent}\nmarkers = keeps_processes\n")


@pytest.mark.parametrize(
    "left",
    [
        "start('61')",
        "start('61', env={'PATH': os.environ['PATH']})",
        "subprocess.run(['sh', '-c', 'sleep 61 & exit'])",
        "subprocess.run(['sh', '-c', 'env -i sleep 61 & exit'], cwd=tmp_path)",
    ],
)
def test_a_process_that_is_left_is_named_and_ended(pytester: pytest.Pytester, left: str) -> None:
    _prepare(pytester)
    pytester.makepyfile(
        f"import os, subprocess\nfrom conftest import start\ndef test_it(tmp_path): {left}\n"
    )
    result = pytester.runpytest_subprocess("-p", "no:xdist")
    result.assert_outcomes(passed=1, errors=1)
    result.stdout.re_match_lines([r".*processes were left behind", r" +\d+: sleep 61"])


def test_what_a_fixture_of_the_session_or_a_module_with_the_marker_starts_may_stay(
    pytester: pytest.Pytester,
) -> None:
    _prepare(pytester)
    pytester.makepyfile(
        test_a="""
        import pytest
        from conftest import start

        @pytest.fixture(scope="session")
        def server():
            process = start("62")
            yield process
            process.kill()
            process.wait()

        def test_session(server): pass
        def test_after(server): assert server.poll() is None
        """,
        test_b="""
        import pytest
        from conftest import start
        pytestmark = pytest.mark.keeps_processes

        @pytest.fixture(scope="module", autouse=True)
        def made():
            found = []
            yield found
            for process in found:
                process.kill()
                process.wait()

        def test_first(made): made.append(start("63"))
        def test_second(made): assert made[0].poll() is None
        """,
        test_c="""
        import pytest
        from conftest import start
        pytestmark = pytest.mark.keeps_processes

        def test_first(): start("64")
        def test_last(): pass
        """,
    )
    result = pytester.runpytest_subprocess("-p", "no:xdist")
    result.assert_outcomes(passed=6, errors=1)
    result.stdout.re_match_lines([r".*processes were left behind", r" +\d+: sleep 64"])
