"""Two measurements on one device wait for each other; on two devices they do not; nobody else can
get in the way."""

from __future__ import annotations

import os
import stat
import subprocess
import sys
import threading
import time
from pathlib import Path

import pytest

from tuna.common import waits
from tuna.common.files import own_folder
from tuna.sandbox import device_lock as locks
from tuna.sandbox.device_lock import DeviceBusy, device_lock


@pytest.fixture(autouse=True)
def temporary(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setattr("tempfile.gettempdir", lambda: str(tmp_path))
    monkeypatch.delenv("XDG_RUNTIME_DIR", raising=False)
    return tmp_path


def test_one_device_is_for_one_measurement_and_another_is_free() -> None:
    with device_lock(["GPU-1"]):
        with pytest.raises(DeviceBusy, match="GPU-1"), device_lock(["GPU-1"], wait_s=0.0):
            pass
        with device_lock(["GPU-2"], wait_s=0.0):
            pass
    with device_lock(["GPU-1"], wait_s=0.0):
        pass


def test_who_shares_a_single_core_waits() -> None:
    with (
        device_lock(["cpu3", "cpu1"]),
        pytest.raises(DeviceBusy),
        device_lock(["cpu2", "cpu3"], wait_s=0.0),
    ):
        pass


def test_a_device_is_taken_as_soon_as_it_is_free() -> None:
    held, let_go = threading.Event(), threading.Event()

    def hold() -> None:
        with device_lock(["GPU-1"]):
            held.set()
            let_go.wait(120)

    thread = threading.Thread(target=hold)
    thread.start()
    assert held.wait(120)
    threading.Timer(0.1, let_go.set).start()
    with device_lock(["GPU-1"], wait_s=30.0):
        assert let_go.is_set()
    thread.join()


def test_waiting_ends_when_nobody_wants_the_device_any_more() -> None:
    asked = time.monotonic()
    with device_lock(["GPU-1"]), pytest.raises(DeviceBusy):
        with device_lock(["GPU-1"], cancelled=lambda: time.monotonic() - asked > 0.1):
            pass


def test_a_holder_that_dies_frees_its_device(temporary: Path) -> None:
    program = (
        "import os, sys\nfrom tuna.sandbox.device_lock import device_lock\n"
        "with device_lock(['GPU-1']):\n    print('held', flush=True)\n    sys.stdin.read()\n"
    )
    env = {**os.environ, "TMPDIR": str(temporary)}
    holder = subprocess.Popen([sys.executable, "-c", program], env=env, stdin=-1, stdout=-1)
    assert holder.stdout is not None
    assert holder.stdout.readline() == b"held\n"
    with pytest.raises(DeviceBusy), device_lock(["GPU-1"], wait_s=0.0):
        pass
    holder.kill()
    holder.communicate()
    with device_lock(["GPU-1"], wait_s=10.0):
        pass


def test_the_folder_is_for_this_user_alone(temporary: Path) -> None:
    (temporary / f"tuna-{os.getuid()}").mkdir(mode=0o777)
    (temporary / f"tuna-{os.getuid()}").chmod(0o777)
    with device_lock(["GPU-1"]):
        (folder,) = locks.folders()
        assert stat.S_IMODE(folder.stat().st_mode) == 0o700
        assert [stat.S_IMODE(path.stat().st_mode) for path in folder.iterdir()] == [0o600]


@pytest.mark.parametrize("theirs", ["a file", "a link"])
def test_what_another_user_put_in_its_place_stops_nobody(
    temporary: Path, tuna_home: Path, tmp_path_factory: pytest.TempPathFactory, theirs: str
) -> None:
    """Anyone can guess the name of the lock's folder and create a file of that name."""
    mine = temporary / f"tuna-{os.getuid()}"
    if theirs == "a file":
        mine.touch(mode=0o600)
    else:
        mine.symlink_to(tmp_path_factory.mktemp("theirs"))
    with device_lock(["GPU-1"]):
        assert locks.folders() == [tuna_home / "run" / "locks"]


def test_a_folder_of_another_owner_is_not_used(
    temporary: Path, tuna_home: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (temporary / "tuna-12345").mkdir()
    monkeypatch.setattr("os.getuid", lambda: 12345)
    with pytest.raises(PermissionError):
        own_folder(temporary / "tuna-12345")


def test_processes_that_know_different_folders_still_wait_for_each_other(
    tmp_path_factory: pytest.TempPathFactory, monkeypatch: pytest.MonkeyPatch
) -> None:
    with device_lock(["GPU-1"]):  # as from cron: no runtime folder
        monkeypatch.setenv("XDG_RUNTIME_DIR", str(tmp_path_factory.mktemp("runtime")))
        assert len(locks.folders()) == 2
        with pytest.raises(DeviceBusy), device_lock(["GPU-1"], wait_s=0.0):
            pass


def test_a_wait_for_a_device_is_told_once(monkeypatch: pytest.MonkeyPatch) -> None:
    """`tune` says, not only in a log, that it waits for another process's measurement."""
    monkeypatch.setattr(locks, "_TOLD_S", 0.0)
    told = list[str]()
    with device_lock(["cpu1"]), waits.shown_by(told.append), pytest.raises(DeviceBusy):
        with device_lock(["cpu1"], wait_s=0.1):
            pass
    assert told == ["another process's measurement on cpu1"]
