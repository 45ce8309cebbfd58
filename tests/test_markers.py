"""A test is marked by what it reaches, and fails if it starts a server without the mark."""

from __future__ import annotations

import subprocess
from pathlib import Path

import markers
import pytest
from hypothesis import given
from hypothesis import strategies as st
from private_servers import redis_server

pytest_plugins = ["pytester"]


class _Farm:
    def start(self) -> None:
        with redis_server():
            pass


def _run() -> None:
    subprocess.run(["true"], check=True)  # noqa: S607


def _imports_tvm() -> None:
    import tvm  # noqa: F401


def test_code_that_is_reached_through_helpers_counts() -> None:
    reached = markers._reached(lambda: _Farm().start())
    assert "private_servers.redis_server" in reached & markers.SERVICES
    assert "subprocess" in markers._reached(lambda: [_run() for _ in range(2)]) & markers.SERVICES
    assert "tvm" in markers._reached(_imports_tvm) & markers.TVM
    of_hypothesis = given(st.none())(lambda _: _imports_tvm())
    assert "tvm" in markers._reached(of_hypothesis) & markers.TVM
    assert not markers._reached(lambda: Path("x").name) & (markers.SERVICES | markers.TVM)


def test_a_server_without_the_mark_fails_its_test(
    pytester: pytest.Pytester, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("PYTEST_DISABLE_PLUGIN_AUTOLOAD", "1")  # most of the time of a start
    pytester.makeconftest(
        "from markers import ServiceGuard\n"
        "def pytest_configure(config): config.pluginmanager.register(ServiceGuard())\n"
    )
    pytester.makeini(f"[pytest]\npythonpath = {Path(__file__).parent}\nmarkers = service\n")
    pytester.makepyfile("""
        import pytest
        import subprocess

        def start(): subprocess.run(["sh", "-c", "exit", "/usr/bin/redis-server"], check=True)

        @pytest.mark.service
        def test_with_the_mark(): start()
        def test_without_the_mark(): start()
        def test_of_another_program(): subprocess.run(["true"], check=True)
    """)
    result = pytester.runpytest_subprocess()
    result.assert_outcomes(passed=3, errors=1)
    result.stdout.fnmatch_lines(
        ["*test_without_the_mark*", "without the mark `service` it started", "*redis-server"]
    )
