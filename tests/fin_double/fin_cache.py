"""The kernel cache, which fin wipes before every solver; the double detects that two processes
share one."""

from __future__ import annotations

import fcntl
import os
import shutil
import time
from pathlib import Path

from .fin_problem import FinError

LOCK = "fin-double.lock"
_MARK = "fin-double.ukdb"


class CacheFolder:
    """MIOPEN_CUSTOM_CACHE_DIR, locked for the lifetime of this process; does nothing without that
    variable."""

    def __init__(self) -> None:
        self._folder = Path(os.environ.get("MIOPEN_CUSTOM_CACHE_DIR", ""))
        self._is_named = bool(os.environ.get("MIOPEN_CUSTOM_CACHE_DIR"))
        self._lock = -1
        self._is_marked = False

    def wipe(self) -> None:
        """Empty the directory and create one file, as every solver does; raises FinError if another
        fin uses it."""
        if not self._is_named:
            return
        if self._lock < 0:
            self._acquire()
        self.check()
        for entry in self._folder.iterdir():
            if entry.name == LOCK:
                continue
            if entry.is_dir() and not entry.is_symlink():
                shutil.rmtree(entry)
            else:
                entry.unlink()
        (self._folder / _MARK).write_text(str(os.getpid()))
        self._is_marked = True

    def check(self) -> None:
        """Raise FinError if the directory was removed or emptied since `wipe`."""
        if self._lock < 0:
            return
        try:
            same = (self._folder / LOCK).stat().st_ino == os.fstat(self._lock).st_ino
        except FileNotFoundError:
            same = False
        if not same or (self._is_marked and not (self._folder / _MARK).exists()):
            raise FinError(f"{self._folder} was removed or emptied while fin used it")

    def _acquire(self) -> None:
        self._folder.mkdir(parents=True, exist_ok=True)
        self._lock = os.open(self._folder / LOCK, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o644)
        try:
            fcntl.flock(self._lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            owner = os.read(self._lock, 20).decode() or "unknown"
            raise FinError(f"{self._folder} is used by another fin, process {owner}") from None
        os.ftruncate(self._lock, 0)
        os.write(self._lock, str(os.getpid()).encode())


def hang() -> None:
    """Never return."""
    while True:
        time.sleep(60)
