"""Fails a test that leaves a process behind, and ends that process.

A process is ours if it has our mark in its environment, has this pytest process among its
ancestors, or works in the folder of the temporary files: Redis overwrites its environment, and
whoever is started in the background loses its ancestors.
"""

from __future__ import annotations

import contextlib
import os
import signal
import time
import uuid
from collections.abc import Generator
from pathlib import Path
from typing import Any

import psutil
import pytest

#: How long what was told to end may take on a busy machine; nobody waits for it when nothing was
#: left.
_GRACE_S = 5.0
_MARK = "PYTEST_PROCESSES_OF"
#: Python's own, ended with the process that started it.
_HELPERS = ("multiprocessing.resource_tracker",)


class LeftBehind:
    """A plug-in. What a fixture of a longer life starts may stay, and until its end what a module
    `keeps_processes` starts."""

    def __init__(self, config: pytest.Config) -> None:
        self._config = config
        self._mark = f"{_MARK}={uuid.uuid4().hex}"
        os.environ[_MARK] = self._mark.partition("=")[2]
        self._others: set[str] = {str(os.getpid())}  # process ids that were looked at
        self._allowed: set[str] = set()
        self._folder = ""

    @pytest.hookimpl(wrapper=True)
    def pytest_fixture_setup(
        self, fixturedef: pytest.FixtureDef[Any], request: pytest.FixtureRequest
    ) -> Generator[None, Any, Any]:
        if fixturedef.scope == "function":
            return (yield)
        before = self._ours()
        result = yield
        self._allowed |= self._ours() - before
        return result

    @pytest.hookimpl(wrapper=True)
    def pytest_runtest_teardown(
        self, item: pytest.Item, nextitem: pytest.Item | None
    ) -> Generator[None, Any, Any]:
        result = yield
        last = nextitem is None or nextitem.path != item.path
        if last or not item.get_closest_marker("keeps_processes"):
            self._refuse()
        return result

    def _refuse(self) -> None:
        deadline = time.monotonic() + _GRACE_S
        while left := self._ours() - self._allowed:
            if time.monotonic() > deadline:
                lines = sorted(_command_line(number) for number in left)
                for number in left:
                    with contextlib.suppress(ProcessLookupError):
                        os.kill(int(number), signal.SIGKILL)
                pytest.fail("\n  ".join(["processes were left behind:", *lines]), pytrace=False)
            time.sleep(0.05)

    def _ours(self) -> set[str]:
        """The ids of processes that the tests of this pytest process started and that live."""
        alive = set(map(str, psutil.pids()))
        self._others &= alive
        self._allowed &= alive
        found = set()
        for number in alive - self._others:
            if number in self._allowed or self._is_ours(number):
                found.add(number)
            else:
                self._others.add(number)
        return found

    def _is_ours(self, number: str) -> bool:
        process = Path("/proc", number)
        try:
            state, parent = (process / "stat").read_text().rpartition(")")[2].split()[:2]
            if state == "Z":
                return False
            if not self._folder:
                self._folder = str(self._config._tmp_path_factory.getbasetemp())  # type: ignore[attr-defined]
            if self._mark.encode() in (process / "environ").read_bytes().split(
                b"\0"
            ) or self._descends(parent):
                return not any(word in _command_line(number) for word in _HELPERS)
            return str((process / "cwd").readlink()).startswith(f"{self._folder}/")
        except OSError:  # it ended, or is another user's
            return False

    def _descends(self, parent: str) -> bool:
        while parent not in ("0", "1"):
            if parent == str(os.getpid()):
                return True
            if parent in self._others:
                return False
            parent = Path("/proc", parent, "stat").read_text().rpartition(")")[2].split()[1]
        return False


def _command_line(number: str) -> str:
    try:
        words = (
            Path("/proc", number, "cmdline")
            .read_bytes()
            .decode(errors="replace")
            .rstrip("\0")
            .split("\0")
        )
    except OSError:
        return f"{number} (ended)"
    return f"{number}: {' '.join(words)}"
