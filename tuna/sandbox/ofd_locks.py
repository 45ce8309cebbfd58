"""Locks on files that the kernel releases with their holder, and that can be looked at without
being taken.

These are open file description locks (fcntl(2), Linux 3.15 and later): unlike those of flock(2),
F_OFD_GETLK tells of them.
"""

from __future__ import annotations

import contextlib
import fcntl
import os
import struct
from collections.abc import Iterator
from pathlib import Path

#: `struct flock` of 64-bit Linux: type, whence, start, length (0: to the end), process, padding.
_FLOCK = "hhqqi4x"


@contextlib.contextmanager
def held(path: Path, *, shared: bool = False) -> Iterator[int | None]:
    """Hold the lock on `path`, which is made if it is missing; gives its descriptor, or None where
    it is held already."""
    with _opened(path) as descriptor:
        try:
            fcntl.fcntl(descriptor, fcntl.F_OFD_SETLK, _request(shared=shared))
        except (BlockingIOError, PermissionError):  # EAGAIN or EACCES
            yield None
        else:
            yield descriptor


def is_held(path: Path) -> bool:
    """Whether anybody holds the lock, shared or not, another part of this process included."""
    try:
        with _opened(path, create=False) as descriptor:
            answer = fcntl.fcntl(descriptor, fcntl.F_OFD_GETLK, _request(shared=False))
    except FileNotFoundError:
        return False
    return bool(struct.unpack(_FLOCK, answer)[0] != fcntl.F_UNLCK)


def _request(*, shared: bool) -> bytes:
    return struct.pack(_FLOCK, fcntl.F_RDLCK if shared else fcntl.F_WRLCK, os.SEEK_SET, 0, 0, 0)


@contextlib.contextmanager
def _opened(path: Path, *, create: bool = True) -> Iterator[int]:
    flags = os.O_RDWR | os.O_CLOEXEC | os.O_NOFOLLOW | (os.O_CREAT if create else 0)
    descriptor = os.open(path, flags, 0o600)
    try:
        yield descriptor
    finally:
        os.close(descriptor)
