"""Files of a model: the one that a user names, and its weights beside it (external data)."""

from __future__ import annotations

import errno
import os
import stat
from collections.abc import Mapping
from pathlib import Path, PurePosixPath

from tuna.errors import BadInput
from tuna.vocabulary import MAX_BYTES

_HINT = "a model's weights lie in its own folder or below it, in plain files, without links"


def read(path: Path) -> bytes:
    """The model file; raises BadInput."""
    try:
        return path.read_bytes()
    except OSError as error:
        raise BadInput(f"{path} cannot be read: {error.strerror}.") from None


def read_beside(model: Path, location: str) -> bytes:
    """Read the file of weights at `location` in the model's folder; raises BadInput for others.

    No link is followed, below the folder either, because someone else may have written the model.

    No link is followed, below the folder either: what the model names was written by someone else.
    """
    parts = PurePosixPath(location).parts
    if not parts or location.startswith("/") or ".." in parts or "\0" in location:
        raise BadInput(
            f"{model.name} wants weights from {location!r}, which is not in its folder.", hint=_HINT
        )
    folder = os.open(model.parent, os.O_RDONLY | os.O_DIRECTORY)
    try:
        for part in parts[:-1]:
            inner = os.open(part, os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW, dir_fd=folder)
            os.close(folder)
            folder = inner
        file = os.open(parts[-1], os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK, dir_fd=folder)
    except OSError as error:
        is_link = isinstance(error, NotADirectoryError) or error.errno == errno.ELOOP
        why = "no plain file" if is_link else error.strerror
        raise BadInput(
            f"{model.name} wants weights from {location!r}, which cannot be read: {why}.",
            hint=_HINT,
        ) from None
    finally:
        os.close(folder)
    try:
        found = os.fstat(file)
        if not stat.S_ISREG(found.st_mode):
            raise BadInput(
                f"{model.name} wants weights from {location!r}, which is no plain file.", hint=_HINT
            )
        if found.st_size > MAX_BYTES:
            raise BadInput(
                f"{location} has more than {MAX_BYTES >> 20} MiB, which the artifact store does not"
                " take."
            )
        with open(file, "rb", closefd=False) as stream:
            return stream.read(MAX_BYTES)
    finally:
        os.close(file)


def lay_out(path: Path, data: bytes, beside: Mapping[str, bytes]) -> None:
    """Write a model to `path`, and its weights where it looks for them."""
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_bytes(data)
    for location, weights in beside.items():
        place = path.parent / location
        place.parent.mkdir(parents=True, exist_ok=True)
        place.write_bytes(weights)
