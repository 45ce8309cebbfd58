"""What a container takes from a process is found by `tuna doctor`, and works where it can."""

from __future__ import annotations

import os
import pwd
from pathlib import Path
from types import SimpleNamespace
from typing import Any, NoReturn

import pytest

from tuna.api.checks import machine
from tuna.api.checks.findings import Finding
from tuna.errors import BadInput
from tuna.sandbox import box, processes
from tuna.settings import Settings, get_settings


def _found(home: Path) -> dict[str, Finding]:
    return {one.what: one for one in machine.of_machine(Settings(home=home))}


@pytest.fixture
def nobody(monkeypatch: pytest.MonkeyPatch) -> None:
    """A user without a name and without HOME, as OpenShift makes them."""

    def unknown(_user: object) -> NoReturn:
        raise KeyError("uid not found")

    monkeypatch.delenv("HOME", raising=False)
    monkeypatch.delenv("XDG_DATA_HOME", raising=False)
    monkeypatch.setattr(pwd, "getpwuid", unknown)


def test_a_user_without_a_home_is_told_to_set_one(
    nobody: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv("TUNA_HOME", raising=False)
    get_settings.cache_clear()
    try:
        with pytest.raises(BadInput, match="no home folder") as error:
            get_settings()
        assert "TUNA_HOME" in error.value.hint
    finally:
        get_settings.cache_clear()


def test_a_user_without_a_home_has_boxes(nobody: None) -> None:
    box._python.cache_clear()
    try:
        assert box._python()[0]
    finally:
        box._python.cache_clear()


def test_a_machine_with_room_has_no_fault(tmp_path: Path) -> None:
    assert all(finding.ok for finding in _found(tmp_path).values())


def test_a_home_without_programs_is_found(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(os, "statvfs", lambda _: SimpleNamespace(f_flag=os.ST_NOEXEC))
    assert not _found(tmp_path)["programs"].ok


def test_shared_memory_that_cannot_be_used_is_found(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def full(*_: object) -> NoReturn:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(machine.multiprocessing, "get_context", full)
    finding = _found(tmp_path)["shared memory"]
    assert (finding.ok, "No space left" in finding.text) == (False, True)


def test_a_low_limit_of_processes_is_found(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "pids.max").write_text("60\n")
    (tmp_path / "pids.current").write_text("20\n")
    monkeypatch.setattr(machine, "_CGROUP", tmp_path)
    finding = _found(tmp_path)["processes"]
    assert finding == Finding("processes", False, "40 more may be started", finding.hint)


def test_a_child_has_its_limits_where_no_file_of_memory_may_be_made(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    def refused(*_: Any) -> NoReturn:
        raise PermissionError(1, "Operation not permitted")

    monkeypatch.setattr(os, "memfd_create", refused)
    assert processes.run(["/bin/echo", "works"], timeout_s=60).output == "works\n"
