"""Landlock (Linux 5.13 and newer): a process gives up files for itself and its descendants.

It needs no rights and no program beside the kernel, and cannot be undone. It closes all files that
no rule names; for processes outside ptrace, their environment and memory in /proc and, from version
6 of its interface (Linux 6.12) on, signals; and mounting. Source:
Documentation/userspace-api/landlock.rst in Linux. Only the standard library is imported here.
"""

from __future__ import annotations

import ctypes
import enum
import os
import stat
import struct
from collections.abc import Iterable

_CREATE_RULESET, _ADD_RULE, _RESTRICT_SELF = 444, 445, 446  # on every architecture
_ASK_VERSION = 1
_PATH_BENEATH = 1
_PR_SET_NO_NEW_PRIVS = 38
_SCOPE_ABSTRACT_UNIX_SOCKET, _SCOPE_SIGNAL = 1, 2
#: First version of the interface that closes signals to processes outside
SIGNALS = 6
#: First version that closes truncation
TRUNCATION = 3


class Right(enum.IntFlag):
    """LANDLOCK_ACCESS_FS_*."""

    EXECUTE = 1 << 0
    WRITE_FILE = 1 << 1
    READ_FILE = 1 << 2
    READ_DIR = 1 << 3
    REMOVE_DIR = 1 << 4
    REMOVE_FILE = 1 << 5
    MAKE_CHAR = 1 << 6
    MAKE_DIR = 1 << 7
    MAKE_REG = 1 << 8
    MAKE_SOCK = 1 << 9
    MAKE_FIFO = 1 << 10
    MAKE_BLOCK = 1 << 11
    MAKE_SYM = 1 << 12
    REFER = 1 << 13
    TRUNCATE = 1 << 14
    IOCTL_DEV = 1 << 15


#: Rights that a version of the interface added
_ADDED = {2: Right.REFER, 3: Right.TRUNCATE, 5: Right.IOCTL_DEV}
_FIRST: Right = Right((1 << 13) - 1)
LIST = Right.READ_DIR
READ = Right.READ_FILE | Right.READ_DIR | Right.EXECUTE
#: Rights to write files and folders, but no links, pipes or devices, which would mislead the
#: process outside that reads the folder
WRITE = READ | Right.WRITE_FILE | Right.REMOVE_DIR | Right.REMOVE_FILE
WRITE |= Right.MAKE_DIR | Right.MAKE_REG | Right.REFER | Right.TRUNCATE
DEVICE = Right.READ_FILE | Right.READ_DIR | Right.WRITE_FILE | Right.TRUNCATE | Right.IOCTL_DEV
#: Rights that apply to files; the others apply to folders
_OF_FILES = Right.EXECUTE | Right.WRITE_FILE | Right.READ_FILE | Right.TRUNCATE | Right.IOCTL_DEV


def version() -> int:
    """The version of the kernel's interface; 0: it has none, or this process may not use it."""
    answer = _syscall(_CREATE_RULESET, None, ctypes.c_size_t(0), ctypes.c_uint32(_ASK_VERSION))
    return max(answer, 0)


def restrict(rules: Iterable[tuple[str, int]], abi: int) -> None:
    """Leave this process the files of `rules`: paths, each with the rights on all below it.

    A path that is not there is skipped. `abi` is the version of the interface to use. Raises
    OSError, and then the process must not go on.
    """
    handled = _FIRST
    for since, right in _ADDED.items():
        handled |= right if abi >= since else Right(0)
    scoped = _SCOPE_ABSTRACT_UNIX_SOCKET | _SCOPE_SIGNAL if abi >= SIGNALS else 0
    # no network: sockets are refused elsewhere, of every family
    attributes = struct.pack("=QQQ", handled, 0, scoped)
    ruleset = _checked(
        _syscall(_CREATE_RULESET, attributes, ctypes.c_size_t(len(attributes)), ctypes.c_uint32(0))
    )
    try:
        for path, rights in rules:
            _add(ruleset, path, Right(rights) & handled)
        _checked(ctypes.CDLL(None, use_errno=True).prctl(_PR_SET_NO_NEW_PRIVS, 1, 0, 0, 0))
        _checked(_syscall(_RESTRICT_SELF, ctypes.c_int(ruleset), ctypes.c_uint32(0)))
    finally:
        os.close(ruleset)


def _add(ruleset: int, path: str, rights: Right) -> None:
    try:
        place = os.open(path, os.O_PATH | os.O_CLOEXEC)
    except (FileNotFoundError, NotADirectoryError, PermissionError):
        return
    try:
        if not stat.S_ISDIR(os.fstat(place).st_mode):
            rights &= _OF_FILES
        rule = struct.pack("=Qi", rights, place)
        numbers = (ctypes.c_int(ruleset), ctypes.c_int(_PATH_BENEATH))
        _checked(_syscall(_ADD_RULE, *numbers, rule, ctypes.c_uint32(0)), path)
    finally:
        os.close(place)


def _syscall(number: int, *arguments: object) -> int:
    libc = ctypes.CDLL(None, use_errno=True)
    libc.syscall.restype = ctypes.c_long
    return int(libc.syscall(ctypes.c_long(number), *arguments))


def _checked(returned: int, what: str = "landlock") -> int:
    if returned < 0:
        raise OSError(ctypes.get_errno(), os.strerror(ctypes.get_errno()), what)
    return returned
