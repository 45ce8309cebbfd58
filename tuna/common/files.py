"""Atomic writes of files and directories, bounded reads of foreign ones, private folders; the user
they are of."""

from __future__ import annotations

import codecs
import contextlib
import ctypes
import errno
import getpass
import itertools
import os
import secrets
import shlex
import shutil
import socket
import sqlite3
import stat
import zlib
from collections.abc import Iterator
from io import BufferedReader
from pathlib import Path, PurePath
from typing import BinaryIO

from tuna.errors import BadInput, StorageFull, TunaError

_FULL = (errno.ENOSPC, errno.EDQUOT, errno.EFBIG)
#: What SQLite, Redis, fsspec and other programs say without an error number
_FULL_TEXTS = ("disk is full", "No space left", "quota exceeded")
#: Maximum of links that are followed, as in the kernel
_MAX_LINKS = 40
#: Kinds of files that are not plain, but for devices
_KINDS = {stat.S_IFDIR: "folder", stat.S_IFIFO: "pipe", stat.S_IFSOCK: "socket"}
_AT_FDCWD = -100
_RENAME_EXCHANGE = 2


def text_encoding(head: bytes) -> str:
    """Return the encoding of a text that begins with `head`, by its byte-order mark: UTF-16 as
    Windows PowerShell writes it, else UTF-8."""
    if head.startswith((codecs.BOM_UTF16_LE, codecs.BOM_UTF16_BE)):
        return "utf-16"
    return "utf-8-sig" if head.startswith(codecs.BOM_UTF8) else "utf-8"


def is_full(error: BaseException) -> bool:
    """True if a disk, a quota or a limit of a file's size (`ulimit -f`) left no space."""
    if isinstance(error, OSError):
        return error.errno in _FULL
    return any(text in str(error) for text in _FULL_TEXTS)


def system_message(error: OSError) -> str:
    """Return the system's sentence, with the file that it is about."""
    place = f": {str(error.filename)[:200]}" if error.filename else ""
    return f"{error.strerror or error}{place}"


class NotPlain(OSError):
    """Not a regular file, or too large a one."""

    def __init__(self, path: PurePath, reason: str) -> None:
        super().__init__(f"{path.name} {reason}")
        self.strerror = f"it {reason}"


def open_plain(
    path: PurePath, flags: int = 0, *, folder: int | None = None, pipes: bool = False
) -> BufferedReader:
    """Open a file for reading that a person or another process names, waiting for no pipe.

    Raises NotPlain for a device, pipe, socket or folder, and OSError. `flags` are more of `os`;
    `folder` is the descriptor of the one in which a relative path begins. With `pipes` a pipe is
    opened too, such as a shell's `<(command)`; one that nobody writes to is empty.
    """
    flags |= os.O_RDONLY | os.O_NONBLOCK | os.O_CLOEXEC
    try:
        descriptor = os.open(path, flags, dir_fd=folder)
    except OSError as error:
        if error.errno not in (errno.ELOOP, errno.ENXIO):  # a link, a socket
            raise
        raise NotPlain(path, f"is not a plain file: {error.strerror}") from None
    kind = stat.S_IFMT(os.fstat(descriptor).st_mode)
    if kind == stat.S_IFREG or (pipes and kind == stat.S_IFIFO):
        os.set_blocking(descriptor, True)
        return open(descriptor, "rb")
    os.close(descriptor)
    raise NotPlain(path, f"is not a plain file, but a {_KINDS.get(kind, 'device')}")


def read_plain(path: Path, most_bytes: int) -> bytes:
    """Read a file that an untrusted process wrote, following no link.

    Raises NotPlain unless it is a regular file of at most `most_bytes`, and OSError.
    """
    with open_plain(path, os.O_NOFOLLOW) as file:
        return read_bounded(file, path, most_bytes)


def read_bounded(file: BinaryIO, path: PurePath, most_bytes: int) -> bytes:
    """Read an open file; raises NotPlain if it has more than `most_bytes`."""
    if os.fstat(file.fileno()).st_size > most_bytes:
        raise NotPlain(path, f"is longer than {most_bytes} bytes")
    return file.read(most_bytes)


@contextlib.contextmanager
def read_errors(path: Path, hint: str = "") -> Iterator[None]:
    """Raise BadInput in place of what the system says of `path`, which is read; `hint` is for one
    that is not there."""
    try:
        yield
    except OSError as error:
        hint = hint if isinstance(error, FileNotFoundError) else ""
        raise BadInput(f"{path} cannot be read: {error.strerror or error}.", hint=hint) from error


def read_text(path: Path, most_bytes: int, hint: str = "") -> str:
    """Read a text that a user names, a pipe too; raises BadInput, as `read_errors` does, for one of
    more than `most_bytes`, and for what is not UTF-8."""
    with read_errors(path, hint), open_plain(path, pipes=True) as file:
        data = file.read(most_bytes + 1)
        if len(data) > most_bytes:
            raise NotPlain(path, f"is longer than {most_bytes} bytes")
    try:
        return data.decode("utf-8-sig")
    except UnicodeDecodeError:
        raise BadInput(f"{path} is not UTF-8 text.") from None


def empty(folder: Path) -> None:
    """Remove the contents of a folder, as far as this user can."""
    for path in list(folder.iterdir()):
        if path.is_dir() and not path.is_symlink():
            shutil.rmtree(path, ignore_errors=True)
        else:
            with contextlib.suppress(OSError):
                path.unlink()


@contextlib.contextmanager
def atomic_file(path: Path) -> Iterator[Path]:
    """Yield a temporary path beside `path`, which it replaces if the block succeeds.

    Missing directories are created. Raises StorageFull without space and BadInput if
    `path` cannot be written; an existing file at `path` is then unchanged.
    """
    if not path.name:
        raise BadInput(f"{path} is not a file name.")
    with write_errors(path), _directory_of(path):
        temporary = _temporary(path)
        try:
            # Creates the file with the permissions of the user's umask.
            os.close(os.open(temporary, os.O_CREAT | os.O_EXCL | os.O_WRONLY, 0o666))
            yield temporary
            _sync(temporary)
            temporary.replace(path)
            _sync(path.parent)
        finally:
            for left in (temporary, Path(f"{temporary}-journal")):
                left.unlink(missing_ok=True)


@contextlib.contextmanager
def atomic_directory(path: Path) -> Iterator[Path]:
    """Yield an empty directory beside `path`, which it replaces if the block succeeds."""
    with write_errors(path), _directory_of(path):
        temporary = _temporary(path)
        try:
            temporary.mkdir()
            yield temporary
            for file in temporary.iterdir():
                _sync(file)
            _sync(temporary)
            _replace_directory(temporary, path)
            _sync(path.parent)
        finally:
            shutil.rmtree(temporary, ignore_errors=True)


def _temporary(path: Path) -> Path:
    return path.with_name(f".{path.name}.{secrets.token_hex(6)}.tmp")


@contextlib.contextmanager
def write_errors(path: Path) -> Iterator[None]:
    """Raise StorageFull or BadInput in place of what the system says of `path`, which is
    written."""
    try:
        yield
    except (OSError, sqlite3.Error) as error:
        if is_full(error):
            raise StorageFull(f"No space is left to write {path}.") from error
        reason = isinstance(error, OSError) and error.strerror
        raise BadInput(f"{path} cannot be written: {reason or error}.") from error


@contextlib.contextmanager
def _directory_of(path: Path) -> Iterator[None]:
    """Create the directory of `path`; remove created directories if the block fails."""
    missing = []
    for directory in (path.parent, *path.parent.parents):
        if directory.exists():
            break
        missing.append(directory)
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        yield
    except (OSError, sqlite3.Error, TunaError):
        for directory in missing:
            with contextlib.suppress(OSError):
                directory.rmdir()
        raise


def _sync(path: Path) -> None:
    handle = os.open(path, os.O_RDONLY)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)


def _replace_directory(new: Path, old: Path) -> None:
    """Rename `new` to `old`, exchanging directories atomically where renameat2 exists."""
    try:
        new.rename(old)
        return
    except OSError as error:
        if error.errno not in (errno.ENOTEMPTY, errno.EEXIST):
            raise
    if not _exchange(new, old):
        replaced = _temporary(old)
        old.rename(replaced)
        new.rename(old)
        shutil.rmtree(replaced)


def _exchange(one: Path, other: Path) -> bool:
    rename = getattr(ctypes.CDLL(None), "renameat2", None)
    if rename is None:
        return False
    return bool(
        rename(_AT_FDCWD, os.fsencode(one), _AT_FDCWD, os.fsencode(other), _RENAME_EXCHANGE) == 0
    )


def bounded_lines(
    stream: BinaryIO, path: Path, line_bytes: int, total_bytes: int
) -> Iterator[bytes]:
    """Yield the lines of a foreign file, with their ends; raises BadInput beyond the limits."""
    left = total_bytes
    for number in itertools.count(1):
        line = stream.readline(line_bytes + 1)
        left -= len(line)
        if len(line) > line_bytes:
            raise BadInput(f"{path}: line {number} has more than {line_bytes >> 20} MiB.")
        if left < 0:
            raise BadInput(f"{path} unpacks to more than {total_bytes >> 20} MiB.")
        if not line:
            return
        yield line


def gunzip(data: bytes, most_bytes: int = 256 << 20) -> bytes:
    """Unpack gzip; raises ValueError if it is damaged, or longer than `most_bytes`."""
    unpacker = zlib.decompressobj(16 + zlib.MAX_WBITS)
    try:
        found = unpacker.decompress(data, most_bytes)
    except zlib.error as error:
        raise ValueError(str(error)) from None
    if not unpacker.eof:
        raise ValueError(f"it is cut off, or has more than {most_bytes} bytes")
    return found


_HINT = "set TUNA_HOME to a folder of your own"


def check_home(home: Path) -> None:
    """Raise BadInput if another user owns TUNA_HOME or may write to it.

    Files in it are executed and trusted. A missing or unreadable home is left to `make_home` and to
    its users.
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


def check_own(path: Path) -> None:
    """Raise BadInput unless only this user and root can change what is read from a file.

    They own the file and every link and folder on the way, and nobody else may write to these; in a
    folder with the sticky bit, such as /tmp, others cannot replace what they do not own. Raises
    OSError for what is not there.
    """
    # a container without the machine's root shows another owner of /, and of folders below it
    owners = {0, os.getuid()}
    above = owners | {Path("/").stat().st_uid}
    for place, found in _way_to(path):
        folder = stat.S_ISDIR(found.st_mode)
        if found.st_uid not in (above if folder else owners):
            raise BadInput(f"{path} is not read: {place} belongs to another user.")
        shared = stat.S_ISLNK(found.st_mode) or (folder and found.st_mode & stat.S_ISVTX)
        if found.st_mode & 0o022 and not shared:
            hint = f"look at what is in it, then run: chmod go-w {shlex.quote(str(place))}"
            raise BadInput(f"{path} is not read: other users may write to {place}.", hint=hint)


def _way_to(path: Path) -> Iterator[tuple[Path, os.stat_result]]:
    """Yield all folders and links through which a path leads, and the file at its end."""
    here, parts, links = Path("/"), [*reversed(Path.cwd().joinpath(path).parts)], 0
    while parts:
        place = here / parts.pop()  # "/" begins anew
        if place.name == "..":
            here = here.parent
            continue
        found = place.lstat()
        yield place, found
        if stat.S_ISLNK(found.st_mode):
            parts += reversed(place.readlink().parts)
            links += 1
            if links > _MAX_LINKS:
                raise OSError(errno.ELOOP, os.strerror(errno.ELOOP), str(path))
        else:
            here = place


def make_home(home: Path) -> None:
    """Make TUNA_HOME for this user alone unless it exists; raises BadInput as `check_home` does."""
    try:
        home.parent.mkdir(parents=True, exist_ok=True)
        home.mkdir(exist_ok=True, mode=0o700)
    except OSError as error:
        raise BadInput(
            f"The folder {home} cannot be used: {error.strerror}.", hint="set TUNA_HOME"
        ) from None
    check_home(home)


def own_folder(folder: Path) -> Path:
    """Return the folder, made with mode 0700; raises OSError for a link or a foreign folder.

    A folder that others may write to is made private, but files that they left in it stay.
    """
    with contextlib.suppress(FileExistsError):
        folder.mkdir(mode=0o700)
    found = folder.lstat()
    if not stat.S_ISDIR(found.st_mode) or found.st_uid != os.getuid():
        raise PermissionError(0, "it is not a folder of yours", str(folder))
    if found.st_mode & 0o077:
        folder.chmod(0o700)
    return folder


def user() -> str:
    """The user of this process, and where."""
    try:
        name = getpass.getuser()
    except (OSError, KeyError):  # a container's user without a name
        name = ""
    return f"{name}@{socket.gethostname()}"
