"""Folders of this user alone: TUNA_HOME, and those of sockets and locks."""

from __future__ import annotations

import contextlib
import os
import shlex
import stat
from pathlib import Path

from tuna.errors import BadInput

_HINT = "set TUNA_HOME to a folder of your own"


def check_home(home: Path) -> None:
    """Raise BadInput if another user owns TUNA_HOME or may write to it: what lies there is run and
    believed.

    A home that does not exist, or cannot be looked at, is for `make_home` and those who use it to
    complain about.
    """
    try:
        link, found = home.lstat(), home.stat()
    except OSError:
        return
    if found.st_uid != os.getuid() or link.st_uid not in (os.getuid(), 0):
        raise BadInput(f"TUNA_HOME, {home}, belongs to another user.", hint=_HINT)
    if stat.S_ISDIR(found.st_mode) and found.st_mode & 0o022:
        hint = f"look for files of others in it, then run: chmod 700 {shlex.quote(str(home))}"
        raise BadInput(f"Other users may write to TUNA_HOME, {home}.", hint=hint)


def make_home(home: Path) -> None:
    """Make TUNA_HOME, for this user alone, unless it exists. Raises BadInput, also for what
    `check_home` refuses."""
    try:
        home.parent.mkdir(parents=True, exist_ok=True)
        home.mkdir(exist_ok=True, mode=0o700)
    except OSError as error:
        raise BadInput(
            f"The folder {home} cannot be used: {error.strerror}.", hint="set TUNA_HOME"
        ) from None
    check_home(home)


def own_folder(folder: Path) -> Path:
    """The folder, made with mode 0700; raises OSError if it is a link, or another user owns it.

    What others may write to is closed: the caller must be able to bear what lies in it already.
    """
    with contextlib.suppress(FileExistsError):
        folder.mkdir(mode=0o700)
    found = folder.lstat()
    if not stat.S_ISDIR(found.st_mode) or found.st_uid != os.getuid():
        raise PermissionError(0, "it is not a folder of yours", str(folder))
    if found.st_mode & 0o077:
        folder.chmod(0o700)
    return folder
