"""Files that visitors send: received in parts, bounded and hashed, looked at, and put into the
artifact store."""

from __future__ import annotations

import contextlib
import fcntl
import hashlib
import io
import os
import pickletools
import re
import secrets
import shutil
import tempfile
import time
import zipfile
from collections.abc import Iterator
from pathlib import Path
from typing import IO

import structlog

from tuna.api import get_settings
from tuna.api.services import remove_unneeded
from tuna.artifacts.store import Artifacts
from tuna.common.files import is_full, make_home, own_folder
from tuna.configs.sources import api_of
from tuna.errors import BadInput, StorageFull
from tuna_serve.settings import service_settings

log = structlog.get_logger(__name__)

#: Name of a file that is in the store too: the digest, before what makes the name its own.
_STORED = re.compile(r"([0-9a-f]{64})\.[0-9a-f]{16}", re.ASCII)
#: Seconds after which a file of nobody was left by a process that was killed.
_LEFT_S = 5.0
#: Bounds of a .pt2 file, a zip archive: its directory, a pickle in it, and the steps of all its
#: pickles, of which a tensor has some twenty.
_DIRECTORY_BYTES, _PICKLE_BYTES, _MAX_STEPS = 1 << 20, 16 << 20, 500_000
_BROKEN_ZIP = (zipfile.BadZipFile, OSError, ValueError, NotImplementedError, EOFError)
#: What torch.save's pickles of tensors call; what loads such a file lets them call even less.
_OF_TENSORS = re.compile(
    r"torch(?!.*(load|exec|run|import|compile|hub))[\w.]* \w+"
    r"|collections OrderedDict|_codecs encode|(builtins|__builtin__) (set|frozenset|dict|list)",
    re.ASCII,
)


class UploadTooLarge(BadInput):
    """The file is larger than it may be."""


class Upload:
    """A file that is received: in a folder of this user, and locked, so that what a killed process
    left can be told from it."""

    def __init__(self, most_bytes: int = 0) -> None:
        """`most_bytes`: 0: what a request may have."""
        self._path = folder() / f"{secrets.token_hex(8)}.part"
        self._hint = "" if most_bytes else "the owner of the service sets TUNA_REQUEST_MIB"
        self._most_bytes = most_bytes or service_settings().request_mib << 20
        self._sha, self.size_bytes = hashlib.sha256(), 0
        self._stored = False
        flags = os.O_RDWR | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW | os.O_CLOEXEC
        self.file: IO[bytes] = os.fdopen(os.open(self._path, flags, 0o600), "r+b")
        fcntl.flock(self.file, fcntl.LOCK_EX)

    def write(self, data: bytes) -> None:
        """Take the next part; raises UploadTooLarge, StorageFull."""
        self.size_bytes += len(data)
        if self.size_bytes > self._most_bytes:
            raise UploadTooLarge(
                f"The file has more than {self._most_bytes >> 20} MiB.",
                hint=self._hint,
            )
        self._sha.update(data)
        with _told():
            self.file.write(data)

    @property
    def digest(self) -> str:
        """SHA-256 (hex) of what has come."""
        return self._sha.hexdigest()

    def rewound(self) -> IO[bytes]:
        """Return the file, to be read from its beginning; raises StorageFull."""
        with _told():
            self.file.flush()
        self.file.seek(0)
        return self.file

    def store(self, artifacts: Artifacts) -> str:
        """Put it into the store; it is removed there again by `close`, or by the next service after
        a kill, unless a request or an entry names it by then."""
        named = self._path.with_name(f"{self.digest}.{self._path.stem}")
        self._path = self._path.replace(named)
        self._stored = True
        artifacts.put_file(self.rewound())
        return self.digest

    def keep(self) -> None:
        """A request or an entry names it."""
        self._stored = False

    def close(self) -> None:
        """Remove it."""
        if self._stored:
            forget(self.digest, mine=self._path)
        self._path.unlink(missing_ok=True)
        with contextlib.suppress(OSError):  # what it has not written may not fit
            self.file.close()


def forget(*digests: str, mine: Path | None = None) -> None:
    """Remove artifacts that nothing needs, nor an upload but `mine`, whose request or entry is not
    written down yet."""
    names = {path.name for path in folder().iterdir() if path != mine}
    received = {found[1] for name in names if (found := _STORED.fullmatch(name))}
    remove_unneeded(digests, beside=received)


@contextlib.contextmanager
def uploaded_before() -> Iterator[None]:
    """Raise BadInput in place of KeyError, by which the artifact store says that a file is gone."""
    try:
        yield
    except KeyError:
        raise BadInput(
            "The file of this request is gone from the artifact store.", hint="submit it again"
        ) from None


def sweep() -> None:
    """Remove what killed processes left."""
    for path in folder().iterdir():
        with contextlib.suppress(FileNotFoundError), _opened(path) as descriptor:
            try:
                fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
            except BlockingIOError:
                continue
            if time.time() - path.stat().st_mtime < _LEFT_S:
                continue
            if found := _STORED.fullmatch(path.name):
                forget(found[1], mine=path)
            shutil.rmtree(path) if path.is_dir() else path.unlink()
            log.info("upload of a killed process removed", file=path.name)


@contextlib.contextmanager
def working_folder() -> Iterator[Path]:
    """Yield a folder for one step of a request, locked as an upload is."""
    with tempfile.TemporaryDirectory(dir=folder()) as place, _opened(Path(place)) as descriptor:
        fcntl.flock(descriptor, fcntl.LOCK_EX)
        yield Path(place)


@contextlib.contextmanager
def _opened(path: Path) -> Iterator[int]:
    descriptor = os.open(path, os.O_RDONLY | os.O_NOFOLLOW | os.O_CLOEXEC)
    try:
        yield descriptor
    finally:
        os.close(descriptor)


def folder() -> Path:
    """Return the folder for files that are received or sent."""
    home = get_settings().home
    make_home(home)
    return own_folder(home / "uploads")


@contextlib.contextmanager
def _told() -> Iterator[None]:
    try:
        yield
    except OSError as error:
        if is_full(error):
            raise StorageFull("No space is left for the file.") from None
        raise


def check_model(name: str, file: IO[bytes]) -> None:
    """Raise BadInput for what is not a model, as far as that can be seen without importing it."""
    ending = Path(name).suffix.lower()
    if ending == ".onnx":
        api_of("models").check_upload(name, file)
    elif ending == ".pt2":
        try:
            steps = iter(range(_MAX_STEPS))
            _check_archive(name, file, os.fstat(file.fileno()).st_size, steps)
        except _BROKEN_ZIP:
            raise _no_archive(name) from None
    else:
        raise BadInput(
            f"{name[:100]!a} is not a model that can be imported.",
            hint="*.onnx, or *.pt2 as torch.export.save writes it",
        )


def _check_archive(
    name: str, file: IO[bytes], size_bytes: int, steps: Iterator[int], inner: bool = False
) -> None:
    archive = _archive(name, file)
    members = archive.infolist()
    unpacked = sum(member.file_size for member in members)
    plain = all(
        member.compress_type == zipfile.ZIP_STORED and not member.flag_bits & 1
        for member in members
    )
    if unpacked > size_bytes or not plain:
        raise BadInput(
            f"{name} has compressed or overlapping members, and would unpack to"
            f" {unpacked >> 20} MiB.",
            hint="write it with torch.export.save, which compresses nothing",
        )
    for member in members:
        with archive.open(member) as stream:
            begin = stream.read(4)
            stream.seek(0)
            if begin == b"PK\x03\x04" and not inner:  # of torch.save
                where = f"{name}: {member.filename[:100]}"
                _check_archive(where, stream, member.file_size, steps, inner=True)
            elif member.filename.endswith(".pkl") or begin[:1] == b"\x80":
                _check_pickle(name, member, stream, steps)


def _archive(name: str, file: IO[bytes]) -> zipfile.ZipFile:
    # of a large directory ZipFile would make as many objects
    found = zipfile._EndRecData(file)  # type: ignore[attr-defined]
    if found and found[zipfile._ECD_SIZE] <= _DIRECTORY_BYTES:  # type: ignore[attr-defined]
        return zipfile.ZipFile(file)
    raise _no_archive(name)


def _no_archive(name: str) -> BadInput:
    return BadInput(
        f"{name[:200]} is not a zip archive, or is cut off.", hint="write it with torch.export.save"
    )


def _check_pickle(
    name: str, member: zipfile.ZipInfo, stream: IO[bytes], steps: Iterator[int]
) -> None:
    """Raise BadInput for a pickle that calls more than what makes tensors, or takes more than the
    `steps` that are left. Bytes of a tensor may look like the beginning of one: those are read as
    far as a reader of pickles would come."""
    hint = "save it with torch.export.save, whose files have tensors alone"
    pickles = io.BytesIO(stream.read(_PICKLE_BYTES))
    try:
        while pickles.tell() < len(pickles.getbuffer()):  # an old form of torch.save has four
            for code, argument, _ in pickletools.genops(pickles):
                if next(steps, None) is None:
                    raise BadInput(
                        f"{name} has pickles of more than {_MAX_STEPS} steps.", hint=hint
                    )
                if code.name not in ("GLOBAL", "INST", "STACK_GLOBAL", "EXT1", "EXT2", "EXT4"):
                    continue
                # torch.save writes the others in no version
                called = str(argument) if code.name == "GLOBAL" else code.name
                if not _OF_TENSORS.fullmatch(called):
                    raise BadInput(
                        f"{name} has pickled code: {member.filename[:100]} calls {called[:100]!a}.",
                        hint=hint,
                    )
    except ValueError:
        if member.filename.endswith(".pkl"):
            raise BadInput(
                f"{name} has a pickle that cannot be read: {member.filename[:100]}.", hint=hint
            ) from None
