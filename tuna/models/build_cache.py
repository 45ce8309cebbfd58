"""Cache of built models by their inputs, so that the same build is not done twice."""

from __future__ import annotations

import contextlib
import hashlib
import json
import os
import shutil
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from tuna.files import atomic_file

#: Number of the latest builds that are kept.
_KEPT = 8
_PACKAGE = Path(__file__).parents[1]
#: Packages with code on which a build depends.
_CODE = ("models", "libraries/tvm", "configs")


class BuildCache:
    """A folder of libraries and facts about them, by key."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder

    def find(self, key: str, output: Path) -> dict[str, Any] | None:
        """Copy a cached library to `output`, return its facts; None if missing or damaged."""
        library, facts = self._paths(key)
        try:
            found: dict[str, Any] = json.loads(facts.read_bytes())
            shutil.copyfile(library, output)
            if found.pop("sha256") != _sha256(output):
                return None
        except (OSError, ValueError, KeyError):
            return None
        with contextlib.suppress(OSError):  # in use
            os.utime(facts)
        return found

    def keep(self, key: str, library: Path, facts: Mapping[str, Any]) -> None:
        """Keep a build, the facts last; forgets the oldest ones. Raises what `atomic_file` does."""
        kept_library, kept_facts = self._paths(key)
        with atomic_file(kept_library) as temporary:
            shutil.copyfile(library, temporary)
            digest = _sha256(temporary)
        with atomic_file(kept_facts) as temporary:
            temporary.write_text(json.dumps({**facts, "sha256": digest}))
        oldest_last = sorted(
            self._folder.glob("*.json"), key=lambda path: path.stat().st_mtime, reverse=True
        )
        for path in oldest_last[_KEPT:]:
            path.unlink(missing_ok=True)
            path.with_suffix(".so").unlink(missing_ok=True)

    def _paths(self, key: str) -> tuple[Path, Path]:
        return self._folder / f"{key}.so", self._folder / f"{key}.json"


def key_of(parts: Mapping[str, Any]) -> str:
    """The key of a build: its inputs, and Tuna's own code that makes it."""
    text = json.dumps({**parts, "code": _code()}, sort_keys=True, separators=(",", ":"))
    return hashlib.sha256(text.encode()).hexdigest()


def _sha256(path: Path) -> str:
    return hashlib.sha256(path.read_bytes()).hexdigest()


def _code() -> str:
    digest = hashlib.sha256()
    for folder in _CODE:
        for path in sorted((_PACKAGE / folder).rglob("*.py")):
            digest.update(path.read_bytes())
    return digest.hexdigest()
