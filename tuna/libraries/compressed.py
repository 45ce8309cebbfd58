"""Database files packed with bzip2, as MIOpen ships its larger ones: transparent reading, and
packing."""

from __future__ import annotations

import bz2
import contextlib
import io
import shutil
import tempfile
from collections.abc import Iterator
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, TextIO

from tuna.common.files import atomic_file, is_full, open_plain, text_encoding
from tuna.errors import BadInput, StorageFull

if TYPE_CHECKING:
    from _typeshed import WriteableBuffer

#: Maximum of bytes of an unpacked file: a few kilobytes can hold terabytes
LIMIT_BYTES = 8 << 30
#: Maximum of characters in a line of a text database; MIOpen's own have less than 2000
LINE_LIMIT = 16 << 20
_CHUNK_BYTES = 1 << 20
_HEAD_BYTES = 1 << 16
_MARK_BYTES = 3  #: length of UTF-8's byte-order mark, the longest


def is_packed(path: Path) -> bool:
    """Whether the file's name says that it is packed."""
    return path.suffix == ".bz2"


def plain_name(path: Path) -> str:
    """The file's name without `.bz2`."""
    return path.name.removesuffix(".bz2")


def head(path: Path) -> bytes:
    """The first 64 KiB of the unpacked file; raises BadInput if it cannot be read.

    Those of a text with a byte-order mark come as UTF-8 without it.
    """
    try:
        with open_plain(path) as file:
            stream = bz2.BZ2File(file) if is_packed(path) else file
            found = stream.read(_HEAD_BYTES)
    except (OSError, EOFError) as error:
        raise BadInput(
            f"{path} cannot be read: {getattr(error, 'strerror', None) or error}."
        ) from error
    encoding = text_encoding(found)
    return found if encoding == "utf-8" else found.decode(encoding, "ignore").encode()


class _Unpacker(io.RawIOBase):
    """The plain bytes of a packed file, up to a limit."""

    def __init__(self, path: Path, limit_bytes: int) -> None:
        self._path, self._limit, self._read = path, limit_bytes, 0
        self._file = open_plain(path)
        self._stream = bz2.open(self._file)  # noqa: SIM115 (close() closes it)

    def readable(self) -> bool:
        return True

    def readinto(self, buffer: WriteableBuffer) -> int:
        try:
            count = self._stream.readinto(buffer)
        except (OSError, EOFError) as error:
            raise BadInput(f"{self._path} cannot be unpacked: {error}.") from error
        self._read += count
        if self._read > self._limit:
            raise BadInput(
                f"{self._path} unpacks to more than {self._limit} bytes.",
                hint="unpack it with bunzip2",
            )
        return count

    def close(self) -> None:
        self._stream.close()
        self._file.close()
        super().close()


def _opened(path: Path, limit_bytes: int) -> io.BufferedReader:
    return io.BufferedReader(_Unpacker(path, limit_bytes), _CHUNK_BYTES)


def open_text(path: Path) -> TextIO:
    """The text of a file, packed or not, with its line ends as they are; close it, or use it in a
    `with`.

    Opening raises OSError. Reading raises BadInput if the packed data is damaged or has more than
    LIMIT_BYTES.
    """
    stream = _opened(path, LIMIT_BYTES) if is_packed(path) else open_plain(path)
    try:
        encoding = text_encoding(stream.peek(_MARK_BYTES))
    except BaseException:
        stream.close()
        raise
    return io.TextIOWrapper(stream, encoding=encoding, newline="\n")


def lines(path: Path, what: str) -> Iterator[tuple[int, str]]:
    """The lines that are not blank, each with its number and without its end; raises BadInput if it
    is not a `what`."""
    try:
        with open_text(path) as stream:
            for number, line in enumerate(iter(partial(stream.readline, LINE_LIMIT), ""), 1):
                if len(line) == LINE_LIMIT:
                    raise BadInput(f"{path} is not a {what}: line {number} does not end.")
                if line.strip():
                    yield number, line.rstrip("\r\n")
    except OSError as error:
        raise BadInput(f"{path} cannot be read: {error.strerror or error}.") from error
    except UnicodeError as error:
        raise BadInput(f"{path} is not a {what}: it is not valid UTF-8.") from error


def line(path: Path, wanted: int, what: str) -> str:
    """The line with this number; raises BadInput if there is none, it is blank, or the file is no
    `what`."""
    for number, text in lines(path, what):
        if number == wanted:
            return text
        if number > wanted:
            raise BadInput(f"{path}:{wanted} is blank.")
    raise BadInput(f"{path} has no line {wanted}.")


@contextlib.contextmanager
def unpacked(path: Path, limit_bytes: int = LIMIT_BYTES) -> Iterator[Path]:
    """Lend the path of a plain file: `path` itself, or a temporary copy in TMPDIR if it is packed.

    Raises BadInput if the file cannot be read or unpacked, or has more than `limit_bytes`;
    StorageFull.
    """
    if not is_packed(path):
        yield path
        return
    with tempfile.TemporaryDirectory(prefix="tuna-") as directory:
        plain = Path(directory) / plain_name(path)
        try:
            with _opened(path, limit_bytes) as source, open(plain, "wb") as out:
                shutil.copyfileobj(source, out, _CHUNK_BYTES)
        except OSError as error:
            if is_full(error):
                raise StorageFull(f"No space is left in {directory} to unpack {path}.") from error
            raise BadInput(f"{path} cannot be read: {error.strerror or error}.") from error
        yield plain


def pack(path_in: Path, path_out: Path) -> None:
    """Pack a file with bzip2 at level 9; equal input gives equal bytes. Raises OSError."""
    with open(path_in, "rb") as source, bz2.open(path_out, "wb", 9) as out:
        shutil.copyfileobj(source, out, _CHUNK_BYTES)


@contextlib.contextmanager
def packed_file(path: Path) -> Iterator[Path]:
    """`files.atomic_file`, but what was written is packed first if `path` ends in `.bz2`."""
    with atomic_file(path) as temporary:
        if not is_packed(path):
            yield temporary
            return
        plain = temporary.with_name(f"{temporary.name}.plain")
        try:
            yield plain
            pack(plain, temporary)
        finally:
            for left in (plain, Path(f"{plain}-journal")):
                left.unlink(missing_ok=True)
