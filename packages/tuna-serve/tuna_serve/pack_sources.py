"""Sources of the kernels in a pack, and which kernels a program will not find because its own
sources are others.

    {"triton/KEY/NAME": {"arch": , "triton_version": , "sources": [
        {"path": , "sha256": , "parts": [
            {"name": , "line": , "lines": , "constant": , "sha256": }]}]}}

Triton's key has the text of each function, comments among it, and the number of its first line, so
that a comment above a kernel is enough for another key (`JITFunction.cache_key`).
"""

from __future__ import annotations

import functools
import hashlib
import json
import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from io import StringIO
from pathlib import Path
from typing import Any

from tuna.common.files import NotPlain, read_plain
from tuna.errors import BadInput

SOURCES = "sources.json"
_MAX_BYTES = 1 << 30
_MAX_SOURCE_BYTES = 16 << 20
#: Folders of packages; what is behind one of them is the same on another machine.
_SITE = re.compile(r".*/(?:site|dist)-packages/")


@dataclass(frozen=True)
class Checked:
    """Kernels of a pack beside the sources that are installed."""

    same: int  #: number of kernels that a program will find
    unknown: tuple[str, ...]  #: kernels whose sources are not known
    #: reasons by kernel, for those that a program will compile
    missed: Mapping[str, tuple[str, ...]]


def text(origins: Mapping[str, Mapping[str, Any]]) -> str:
    """Return the content of the file."""
    return json.dumps(origins, indent=1, sort_keys=True) + "\n"


def check(pack: Path, site: Path | None = None, triton_version: str = "") -> Checked:
    """Compare the sources of each kernel with those that are installed: at the same paths, or where
    `site` has the packages. Kernels of another release of Triton than `triton_version`, if it is
    given, are missed too. Raises BadInput for a folder without sources.
    """
    try:
        document = json.loads(read_plain(pack / SOURCES, _MAX_BYTES))
        kernels = {str(name): dict(facts) for name, facts in document.items()}
    except (NotPlain, OSError, ValueError, TypeError, AttributeError) as error:
        raise BadInput(
            f"{pack} is not a pack with the sources of its kernels: {error}",
            hint="pack the space again; programs need a tuna-cache-client that stores sources",
        ) from None
    installed = _Installed(site)
    same, unknown, missed = 0, [], {}
    for name, facts in sorted(kernels.items()):
        reasons = list(_other_triton(facts, triton_version))
        try:
            for source in facts["sources"] or ():
                reasons += installed.differences(source)
        except (LookupError, TypeError) as error:
            raise BadInput(f"{pack / SOURCES} is not as it was written: {error}.") from None
        if reasons:
            missed[name] = tuple(dict.fromkeys(reasons))
        elif facts["sources"]:
            same += 1
        else:
            unknown.append(name)
    return Checked(same, tuple(unknown), missed)


def _other_triton(facts: Mapping[str, Any], version: str) -> Iterator[str]:
    if version and facts.get("triton_version") not in ("", version):
        yield f"of Triton {facts.get('triton_version')}, not {version}"


class _Installed:
    """Source files of this machine."""

    def __init__(self, site: Path | None) -> None:
        self._site = site
        self._lines = functools.cache(self._read)

    def differences(self, source: Mapping[str, Any]) -> list[str]:
        """Return the reasons for which a kernel with this source has another key."""
        path = self._place(source["path"])
        lines = self._lines(path)
        if lines is None:
            return [f"{path} is missing"]
        if hashlib.sha256("".join(lines).encode()).hexdigest() == source["sha256"]:
            return []
        if not source["parts"]:
            return [f"{path} is changed"]
        return [f"{path}: {why}" for part in source["parts"] if (why := _difference(part, lines))]

    def _place(self, path: str) -> Path:
        inside = _SITE.match(path)
        if self._site is None or inside is None:
            return Path(path)
        return self._site / path[inside.end() :]

    def _read(self, path: Path) -> list[str] | None:
        try:
            return StringIO(read_plain(path, _MAX_SOURCE_BYTES).decode()).readlines()
        except (NotPlain, OSError, UnicodeError):
            return None


def _difference(part: Mapping[str, Any], lines: list[str]) -> str:
    """Return why a part gives another key in a file with these lines; empty if it does not."""
    name, count = part["name"], part["lines"]
    beginning = re.compile(rf"\s*(?:def\s+)?{re.escape(name)}\b")
    starts = [at for at, line in enumerate(lines) if beginning.match(line)]
    places = [
        at + 1
        for at in starts
        if _digest(lines[at : at + count]) == part["sha256"] and not _goes_on(lines, at, count)
    ]
    if part["line"] in places or (places and part["constant"]):
        return ""
    if places:
        return f"{name} is in line {places[0]}, not {part['line']}"
    return f"{name} is changed" if starts else f"{name} is missing"


def _digest(block: list[str]) -> str:
    return hashlib.sha256("".join(block).encode()).hexdigest()


def _goes_on(lines: list[str], at: int, count: int) -> bool:
    """True if what follows a block, such as a comment, belongs to it by its indentation."""
    following = next((line for line in lines[at + count :] if line.strip()), "")
    return _indentation(following) > _indentation(lines[at])


def _indentation(line: str) -> int:
    return len(line) - len(line.lstrip())
