"""The file of an archived session: gzipped lines of JSON from a header to a hash.

Each line is `[name, value]`. The first is `["tuna-session", header]`, rows of tables follow in
batches, each ended by `["batch", null]`, and the last is `["end", SHA-256 of all bytes before it]`.
Nothing in it is ever executed.
"""

from __future__ import annotations

import contextlib
import gzip
import hashlib
import json
import zlib
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any, BinaryIO, NamedTuple, cast

from pydantic import Field, TypeAdapter, ValidationError

from tuna.errors import BadInput
from tuna.files import atomic_file, bounded_lines

NAME, VERSION = "tuna-session", 1
BATCH, END = "batch", "end"
#: Largest artifact, since lines are read into memory and a few kilobytes can unpack to gigabytes.
_MAX_ARTIFACT_BYTES = 64 << 20
#: Longest line: the largest artifact in base64, and its row; any other line; and all lines.
_MAX_LINE_BYTES = _MAX_ARTIFACT_BYTES // 3 * 4 + (1 << 20)
_MAX_ROW_BYTES, _MAX_BYTES = 8 << 20, 64 << 30
#: Beginning of an artifact's row, and its most values: JSON values take fifty times the memory of
#: their text, a string takes no more than it.
_KERNEL, _MAX_KERNEL_VALUES = b'["kernel",[', 16


@dataclass(frozen=True)
class ArchiveHeader:
    """First line of an archive."""

    uuid: Annotated[str, Field(min_length=1, max_length=36)]  #: of the session
    library: str
    reason: str
    tuna: str  #: version that wrote it
    schema: str  #: revision of the database's schema
    columns: Mapping[str, Sequence[str]]  #: by table, in the order of a row's values
    ids: Mapping[str, Sequence[int]]  #: by table, the least and the largest id
    jobs: int

    def json(self) -> dict[str, Any]:
        """The header as the file has it."""
        return {"version": VERSION, **vars(self)}


_HEADER = TypeAdapter(ArchiveHeader)


class ArchiveLine(NamedTuple):
    """A line between header and end."""

    name: str
    value: Any
    size_bytes: int


class ArchiveWriter:
    """Appends lines to an archive."""

    def __init__(self, stream: gzip.GzipFile) -> None:
        self._stream, self._hash = stream, hashlib.sha256()

    def line(self, name: str, value: Any) -> None:
        """Append one line; raises BadInput for one that is too long to be restored."""
        data = _line(name, value)
        if not _is_bounded(data):
            raise BadInput(
                f"A row of table {name} has {len(data) >> 20} MiB, more than an archive takes."
            )
        self._hash.update(data)
        self._stream.write(data)

    def end(self) -> None:
        """Append the hash."""
        self._stream.write(_line(END, self._hash.hexdigest()))


@contextlib.contextmanager
def writer(path: Path, header: ArchiveHeader) -> Iterator[ArchiveWriter]:
    """Write an archive, which appears when it is complete; equal rows give equal bytes."""
    with (
        atomic_file(path) as temporary,
        open(temporary, "wb") as raw,
        gzip.GzipFile("", "wb", 6, raw, mtime=0) as stream,
    ):
        archive = ArchiveWriter(stream)
        archive.line(NAME, header.json())
        yield archive
        archive.end()


def verify(path: Path) -> ArchiveHeader:
    """Read an archive to its end, check its hash, and return its header; raises BadInput."""
    header: ArchiveHeader | None = None
    for name, value, _ in _checked(path):
        if header is None:
            header = _header(path, name, value)
    if header is None:
        raise BadInput(f"{path} is no archive of a session.")
    return header


def rows(path: Path) -> Iterator[ArchiveLine]:
    """Yield the lines between header and end; raises BadInput as `verify` does."""
    lines = _checked(path)
    next(lines, None)
    yield from lines


def _is_bounded(data: bytes) -> bool:
    """Whether a line takes little memory when it is read."""
    if len(data) <= _MAX_ROW_BYTES:
        return True
    return (
        data.startswith(_KERNEL)
        and data.count(b",") <= _MAX_KERNEL_VALUES
        and len(data) <= _MAX_LINE_BYTES
    )


def _checked(path: Path) -> Iterator[ArchiveLine]:
    """Yield all lines but the last; raises BadInput unless that has their hash."""
    found, read = hashlib.sha256(), 0
    try:
        with gzip.open(path, "rb") as stream:
            for data in bounded_lines(cast(BinaryIO, stream), path, _MAX_LINE_BYTES, _MAX_BYTES):
                if not _is_bounded(data):
                    raise BadInput(f"{path} is damaged: a line has {len(data) >> 20} MiB.")
                name, value = json.loads(data, parse_constant=_refuse)
                if name == END:
                    if value != found.hexdigest() or stream.read(1):
                        raise BadInput(
                            f"{path} is damaged: its contents do not have the hash that it names."
                        )
                    return
                if not read and name != NAME:
                    break
                found.update(data)
                read += 1
                yield ArchiveLine(name, value, len(data))
    except gzip.BadGzipFile as error:
        if not read:
            raise BadInput(f"{path} is no archive of a session.") from None
        raise BadInput(f"{path} is damaged: {error}.") from None
    except EOFError:
        raise BadInput(
            f"{path} is cut off: its end is missing.", hint="copy it again, or archive again"
        ) from None
    except (zlib.error, ValueError, TypeError, RecursionError) as error:
        if not read:
            raise BadInput(f"{path} is no archive of a session.") from None
        raise BadInput(f"{path} is damaged: {str(error)[:100]}.") from None
    except OSError as error:
        raise BadInput(f"{path} cannot be read: {error.strerror or error}.") from None
    if read:
        raise BadInput(
            f"{path} is cut off: its end is missing.", hint="copy it again, or archive again"
        )
    raise BadInput(f"{path} is no archive of a session.")


def _header(path: Path, name: str, value: Any) -> ArchiveHeader:
    if name != NAME or not isinstance(value, dict) or not isinstance(value.get("version"), int):
        raise BadInput(f"{path} is no archive of a session.")
    if value["version"] != VERSION:
        raise BadInput(
            f"{path} has version {value['version']} of the format, and this version of Tuna reads"
            f" {VERSION}.",
            hint=f"restore it with Tuna {value.get('tuna')}",
        )
    try:
        return _HEADER.validate_python({key: one for key, one in value.items() if key != "version"})
    except ValidationError:
        raise BadInput(f"{path} is damaged: its header is not complete.") from None


def _refuse(constant: str) -> None:
    """Refuse NaN and infinity, which no database has."""
    raise ValueError(f"{constant} is no number")


def _line(name: str, value: Any) -> bytes:
    return json.dumps([name, value], separators=(",", ":"), allow_nan=False).encode() + b"\n"
