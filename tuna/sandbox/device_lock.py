"""File locks by which one process of a user measures on a device; freed when the holder dies.

The files lie in private folders of the user, below XDG_RUNTIME_DIR and below the folder for
temporary files. A lock is acquired in each that exists, because processes of one user may differ in
these (a cron job may have no XDG_RUNTIME_DIR).
"""

from __future__ import annotations

import contextlib
import fcntl
import os
import re
import tempfile
import time
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path

import structlog

from tuna.common import waits
from tuna.common.files import make_home, own_folder
from tuna.settings import get_settings

log = structlog.get_logger(__name__)

#: Seconds between polls of a held lock: short at first, because most chunks are short.
_FIRST_PAUSE_S, _LONGEST_PAUSE_S = 0.01, 0.25
#: Seconds after which a wait is logged
_TOLD_S = 2.0


class DeviceBusy(Exception):
    """Timeout: another process held the device."""


@contextlib.contextmanager
def device_lock(
    names: Iterable[str],
    wait_s: float = float("inf"),
    cancelled: Callable[[], bool] = lambda: False,
) -> Iterator[None]:
    """Hold the locks called `names` (such as `DeviceHandle.locks`); wait up to `wait_s` for them,
    and tell of it (`waits`).

    Raises DeviceBusy after that, or when `cancelled` returns True.
    """
    deadline = time.monotonic() + wait_s
    with contextlib.ExitStack() as stack:
        # Always in the same order, so that two processes which need several cannot deadlock.
        for folder in folders():
            for name in sorted(set(names)):
                file = f"device-{re.sub(r'[^A-Za-z0-9_.-]', '_', name)[:200]}.lock"
                descriptor = stack.enter_context(opened(folder / file))
                _acquire(descriptor, name, deadline, cancelled)
        yield


def _acquire(descriptor: int, name: str, deadline: float, cancelled: Callable[[], bool]) -> None:
    pause_s, asked_at, told = _FIRST_PAUSE_S, time.monotonic(), False
    while True:
        try:
            fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
            return
        except BlockingIOError:
            if time.monotonic() >= deadline or cancelled():
                raise DeviceBusy(f"another process measures on {name}") from None
        if not told and time.monotonic() - asked_at >= _TOLD_S:
            log.info("waiting for a device", device=name)
            waits.tell(f"another process's measurement on {name}")
            told = True
        time.sleep(pause_s)
        pause_s = min(2 * pause_s, _LONGEST_PAUSE_S)


@contextlib.contextmanager
def opened(path: Path, *, create: bool = True) -> Iterator[int]:
    """Lend the descriptor of a lock's file, never of what a link names."""
    flags = os.O_RDWR | os.O_CLOEXEC | os.O_NOFOLLOW | (os.O_CREAT if create else 0)
    descriptor = os.open(path, flags, 0o600)
    try:
        yield descriptor
    finally:
        os.close(descriptor)


def folders() -> list[Path]:
    """The private folders for locks; a folder in TUNA_HOME when the shared ones are unusable."""
    found = []
    for parent in filter(None, (os.environ.get("XDG_RUNTIME_DIR"), tempfile.gettempdir())):
        with contextlib.suppress(OSError):
            found.append(own_folder(Path(parent) / f"tuna-{os.getuid()}"))
    if found:
        return list(dict.fromkeys(found))
    settings = get_settings()
    fallback = settings.run_dir / "locks"
    log.warning("device locks not shared across TUNA_HOMEs", folder=str(fallback))
    make_home(settings.home)
    return [own_folder(own_folder(settings.run_dir) / fallback.name)]
