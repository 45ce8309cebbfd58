"""An archive at a URL: the bytes of its file in parts, each named by its session, its number and
its SHA-256, and an index, which is written last."""

from __future__ import annotations

import contextlib
import hashlib
import json
import os
import re
import shutil
from collections.abc import Iterator
from dataclasses import asdict, dataclass
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Annotated, BinaryIO

from pydantic import Field, TypeAdapter, ValidationError

from tuna.archives.archive import SESSION_UUID, ArchiveHeader
from tuna.artifacts.files import Folder
from tuna.common.files import make_home
from tuna.errors import BadInput, StorageFull

INDEX = "index.json"
_FORMAT = "tuna-session-parts"
#: Bounds of a part's bytes, and the number by which those sent before are divided: a process that
#: is killed while it sends a part has lost no more, and a reader has one part in memory
_MIN_BYTES, _MAX_BYTES, _SHARE = 256 << 10, 16 << 20, 100
#: Maximum of bytes of a part that is read
_MAX_PART_BYTES = 64 << 20
_NAME = rf"(?P<session>{SESSION_UUID})-(?P<number>\d{{6}})-(?P<sha256>[0-9a-f]{{64}})\.part"
_PART = re.compile(_NAME)


@dataclass(frozen=True)
class ArchiveIndex:
    """The index of an archive in parts."""

    session: str  #: UUID of the session
    reason: str
    trials: int
    parts: list[Annotated[str, Field(pattern=f"^{_NAME}$")]]  #: names of the parts, in order
    format: str = _FORMAT


_INDEX = TypeAdapter(ArchiveIndex)


@dataclass(frozen=True)
class SentArchive:
    """Sizes of an archive at a URL."""

    size_bytes: int
    sent_bytes: int  #: number of bytes sent, without the parts that were there


def is_url(place: str) -> bool:
    """Whether an archive is at a URL in parts, and not a local file."""
    return "://" in place


def send(path: Path, url: str, header: ArchiveHeader, trials: int) -> SentArchive:
    """Send an archive's file, but for the parts that are there; the index of an earlier one holds
    until all are.

    `trials`: of its session. Raises BadInput for an invalid UUID, for a place with the archive
    of another session, or with trials that this one has no more, and StoreUnavailable.
    """
    if not re.fullmatch(SESSION_UUID, header.uuid):  # restored by a version that took any
        raise BadInput(f"The session's UUID, {header.uuid!a}, is invalid, and it would name files.")
    folder = Folder(url)
    sizes = folder.sizes()
    before = read_index(folder) if INDEX in sizes else None
    if before is not None:
        _require_session(before, header.uuid, folder.shown)
        if before.trials > trials:
            raise BadInput(
                f"{folder.shown} has {before.trials} trials of the session, of which {trials} are"
                " left here.",
                hint="archive what is left to another URL",
            )
    index = ArchiveIndex(header.uuid, header.reason, trials, [])
    sent = 0
    with open(path, "rb") as file:
        for data in _cut(file):
            name = _name(header.uuid, len(index.parts), data)
            if sizes.get(name) != len(data) or folder.read(name) != data:
                folder.write(name, data)
                sent += len(data)
            index.parts.append(name)
    folder.write(INDEX, json.dumps(asdict(index), indent=1).encode())
    names = [name for name in folder.sizes() if name.startswith(f"{header.uuid}-")]
    folder.remove(sorted({*names} - {*index.parts}))
    return SentArchive(path.stat().st_size, sent)


def _cut(file: BinaryIO) -> Iterator[bytes]:
    done = 0
    while data := file.read(min(max(done // _SHARE, _MIN_BYTES), _MAX_BYTES)):
        yield data
        done += len(data)


def _name(uuid: str, number: int, data: bytes) -> str:
    return f"{uuid}-{number:06}-{hashlib.sha256(data).hexdigest()}.part"


def read_index(folder: Folder) -> ArchiveIndex:
    """The index of the archive at a URL; raises BadInput where there is none."""
    try:
        found = _INDEX.validate_json(folder.read(INDEX))
    except FileNotFoundError:
        raise BadInput(
            f"{folder.shown} has no archive of a session: {INDEX}, which is written last, is"
            " missing.",
            hint="archive the session again: parts that are there are not sent again",
        ) from None
    except ValidationError:
        raise BadInput(f"{folder.shown}/{INDEX} is not an index of an archive.") from None
    if found.format != _FORMAT:
        raise BadInput(f"{folder.shown}/{INDEX} is not an index of an archive.")
    return found


def _require_session(index: ArchiveIndex, uuid: str, url: str) -> None:
    if index.session != uuid:
        raise BadInput(
            f"{url} has the archive of another session, {index.session} ({index.reason}), not of"
            f" {uuid}.",
            hint="give another URL",
        )


def _fetch(url: str, path: Path, uuid: str | None) -> str:
    """Write the file of the archive at a URL, which is returned without secrets.

    Raises BadInput for a part that is missing, changed or of another session, and where it is not
    of the session `uuid`.
    """
    folder = Folder(url)
    index, sizes = read_index(folder), folder.sizes()
    if uuid is not None:
        _require_session(index, uuid, folder.shown)
    try:
        with open(path, "wb") as file:
            for number, name in enumerate(index.parts):
                parts = _PART.fullmatch(name)
                assert parts is not None
                if parts["session"] != index.session or int(parts["number"]) != number:
                    raise BadInput(
                        f"{folder.shown} is damaged: {name} is not part {number} of session"
                        f" {index.session}."
                    )
                if name not in sizes:
                    raise BadInput(f"{folder.shown} is damaged: {name} is missing.")
                data = folder.read(name) if sizes[name] <= _MAX_PART_BYTES else b""
                if hashlib.sha256(data).hexdigest() != parts["sha256"]:
                    raise BadInput(
                        f"{folder.shown} is damaged: {name} has other bytes than its name says."
                    )
                file.write(data)
    except FileNotFoundError as error:
        raise BadInput(f"{folder.shown} changed while it was read: {error}.") from None
    except OSError as error:
        raise StorageFull(f"The archive cannot be kept in {path.parent}: {error}.") from None
    return folder.shown


@contextlib.contextmanager
def temporary(home: Path) -> Iterator[Path]:
    """A folder in TUNA_HOME for the file of an archive; those of killed processes are removed."""
    make_home(home)
    for left in home.glob("archive-*-*"):
        if not Path("/proc", left.name.split("-")[1]).exists():
            shutil.rmtree(left, ignore_errors=True)
    with TemporaryDirectory(dir=home, prefix=f"archive-{os.getpid()}-") as folder:
        yield Path(folder)


@contextlib.contextmanager
def fetched(place: str, home: Path, uuid: str | None = None) -> Iterator[Path]:
    """The file of an archive: a local one, or what is at a URL, in a temporary folder in TUNA_HOME
    whose name errors do not have.

    Raises as `_fetch` does.
    """
    if not is_url(place):
        yield Path(place)
        return
    with temporary(home) as folder:
        path = folder / "archive"
        shown = _fetch(place, path, uuid)
        try:
            yield path
        except BadInput as error:
            said, hint = (text.replace(str(path), shown) for text in (str(error), error.hint))
            raise type(error)(said, hint=hint) from None
