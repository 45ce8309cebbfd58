"""Files of a model: the one that a user names, its weights beside it (external data), the
libraries that were built of it, and the right answers."""

from __future__ import annotations

import contextlib
import hashlib
import json
import os
import shutil
from collections.abc import Mapping
from importlib.util import find_spec
from pathlib import Path, PurePosixPath
from typing import Any

from tuna.common.files import atomic_file, open_plain, read_bounded, read_errors, write_errors
from tuna.errors import BadInput
from tuna.vocabulary import MAX_BYTES

_HINT = "a model's weights lie in its own folder or below it, in plain files, without links"
_EXAMPLE = (
    "export one from your framework; in a checkout"
    " `python examples/make_models.py resnet18 -o model.onnx` writes one"
)
#: Number of the latest files that a cache keeps.
_KEPT = 8
#: Packages with code on which a build depends.
_CODE = ("tuna_models", "tuna.libraries.tvm", "tuna.configs")


def read(path: Path) -> bytes:
    """The model file; raises BadInput."""
    with read_errors(path, _EXAMPLE), open_plain(path) as file:
        return read_bounded(file, path, MAX_BYTES)


def read_beside(model: Path, location: str) -> bytes:
    """Read the file of weights at `location` in the model's folder; raises BadInput for others.

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
        with open_plain(PurePosixPath(parts[-1]), os.O_NOFOLLOW, folder=folder) as file:
            return read_bounded(file, PurePosixPath(location), MAX_BYTES)
    except OSError as error:
        is_link = isinstance(error, NotADirectoryError)
        raise BadInput(
            f"{model.name} wants weights from {location!r}, which cannot be read:"
            f" {'it is not a plain file' if is_link else error.strerror}.",
            hint=_HINT,
        ) from None
    finally:
        os.close(folder)


def write(path: Path, data: bytes) -> None:
    """Write a model, or weights where it looks for them; raises StorageFull."""
    with write_errors(path):
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_bytes(data)


class BuildCache:
    """A folder of files, such as built libraries, and facts about them, by key."""

    def __init__(self, folder: Path, suffix: str = ".so") -> None:
        """`suffix` is that of the files."""
        self._folder, self._suffix = folder, suffix

    def find(self, key: str, output: Path) -> dict[str, Any] | None:
        """Copy a cached file to `output`, return its facts; None if missing or damaged."""
        file, facts = self._paths(key)
        try:
            found: dict[str, Any] = json.loads(facts.read_bytes())
            shutil.copyfile(file, output)
            if found.pop("sha256") != _sha256(output):
                return None
        except (OSError, ValueError, KeyError):
            return None
        with contextlib.suppress(OSError):  # in use
            os.utime(facts)
        return found

    def keep(self, key: str, file: Path, facts: Mapping[str, Any]) -> None:
        """Keep a file, the facts last; forgets the oldest ones. Raises what `atomic_file` does."""
        kept_file, kept_facts = self._paths(key)
        with atomic_file(kept_file) as temporary:
            shutil.copyfile(file, temporary)
            digest = _sha256(temporary)
        with atomic_file(kept_facts) as temporary:
            temporary.write_text(json.dumps({**facts, "sha256": digest}))
        oldest_last = sorted(
            self._folder.glob("*.json"), key=lambda path: path.stat().st_mtime, reverse=True
        )
        for path in oldest_last[_KEPT:]:
            path.unlink(missing_ok=True)
            path.with_suffix(self._suffix).unlink(missing_ok=True)

    def _paths(self, key: str) -> tuple[Path, Path]:
        return self._folder / f"{key}{self._suffix}", self._folder / f"{key}.json"


def key_of(parts: Mapping[str, Any]) -> str:
    """The key of a build: its inputs, and Tuna's own code that makes it."""
    text = json.dumps({**parts, "code": _code()}, sort_keys=True, separators=(",", ":"))
    return hashlib.sha256(text.encode()).hexdigest()


def _sha256(path: Path) -> str:
    return hashlib.sha256(path.read_bytes()).hexdigest()


def _code() -> str:
    digest = hashlib.sha256()
    for name in _CODE:
        spec = find_spec(name)
        assert spec is not None
        for folder in spec.submodule_search_locations or ():
            for path in sorted(Path(folder).rglob("*.py")):
                digest.update(path.read_bytes())
    return digest.hexdigest()
