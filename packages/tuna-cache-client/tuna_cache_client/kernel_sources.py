"""Source files of a Triton kernel: which functions its code was compiled from, and in which lines.

Triton's key has the text of each `@triton.jit` function that a kernel uses, its comments and the
number of its first line among them (`JITFunction.cache_key`), and the values of constants. The
compiler's input names files and lines; functions are taken from there, not by import.
"""

from __future__ import annotations

import ast
import functools
import hashlib
import inspect
import json
import re
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from io import StringIO
from pathlib import Path
from typing import Any

#: End of the name of the file with the sources, behind the name of the kernel.
SOURCES = ".sources"
#: Ends of the names of the compiler's input; what is first there is taken.
_INPUTS = (".source", ".ttir")
_PLACE = re.compile(rb'loc\("([^"\n]+)":(\d+):\d+')
_MAX_BYTES = 16 << 20


@dataclass(frozen=True)
class _Part:
    """A function or a constant."""

    name: str
    line: int  #: number of the line with its `def`, or its name
    block: list[str]
    first: int  #: number of the first line, which is that of a decorator; 0: a constant
    uses: set[str]

    @property
    def span(self) -> range:
        """The numbers of its lines."""
        return range(self.first, self.line + len(self.block))

    def as_json(self) -> dict[str, Any]:
        """Return what is stored."""
        digest = hashlib.sha256("".join(self.block).encode()).hexdigest()
        facts = {"name": self.name, "line": self.line, "lines": len(self.block)}
        return {**facts, "constant": not self.first, "sha256": digest}


def sources_name(metadata: str) -> str:
    """Return the name of the file with the sources, by that of the metadata."""
    return metadata.removesuffix(".json") + SOURCES


def kernel_sources(files: Mapping[str, bytes], without: Path) -> bytes:
    """Return the source files of a kernel as JSON, by path, but for those below `without`, which
    is Triton itself:

        [{"path": , "sha256": , "parts": [{"name": , "line": , "lines": , "constant": ,
                                               "sha256": }]}]

    A part is a function from its `def` on, or a constant: so many lines from that one on. A file
    that cannot be read any more has none. Empty for a kernel whose sources are not known.
    """
    ended = (data for end in _INPUTS for name, data in files.items() if name.endswith(end))
    lines: dict[str, set[int]] = {}
    for path, line in _PLACE.findall(next(ended, b"")):
        lines.setdefault(path.decode(errors="replace"), set()).add(int(line))
    sources = []
    for path, used in sorted(lines.items()):
        if without not in Path(path).parents:
            digest, parts = _parts(path)
            taken = _used(parts, used)
            sources.append({"path": path, "sha256": digest, "parts": taken})
    return json.dumps(sources).encode() if sources else b""


def _read_parts(data: bytes) -> list[_Part]:
    """Functions and constants of a Python file; raises ValueError for one that is not Python."""
    try:
        text = data.decode()
        tree = ast.parse(text)
    except (SyntaxError, RecursionError) as error:
        raise ValueError(str(error)) from None
    lines = StringIO(text).readlines()
    return [part for node in tree.body for part in _parts_of(node, lines)]


def _parts_of(node: ast.stmt, lines: list[str]) -> Iterator[_Part]:
    if isinstance(node, ast.FunctionDef):
        # decorators are not in the key; the block ends as it does for Triton's getsourcelines
        block = inspect.getblock(lines[node.lineno - 1 :])
        first = min([node.lineno, *(one.lineno for one in node.decorator_list)])
        yield _Part(node.name, node.lineno, block, first, _names(node))
    elif isinstance(node, ast.ClassDef | ast.If | ast.Try):
        nested = [*node.body, *getattr(node, "orelse", [])]
        for handler in getattr(node, "handlers", []):
            nested += handler.body
        for one in nested:
            yield from _parts_of(one, lines)
    elif isinstance(node, ast.Assign | ast.AnnAssign) and node.value is not None:
        block = lines[node.lineno - 1 : node.end_lineno]
        for target in node.targets if isinstance(node, ast.Assign) else [node.target]:
            if isinstance(target, ast.Name):
                yield _Part(target.id, node.lineno, block, 0, _names(node))


def _names(node: ast.stmt) -> set[str]:
    return {one.id for one in ast.walk(node) if isinstance(one, ast.Name)}


def _used(parts: Iterable[_Part], lines: set[int]) -> list[dict[str, Any]]:
    """Functions with one of these lines, and what they use of the same file, and so on."""
    parts = list(parts)
    known = {part.name for part in parts}
    wanted = {part.name for part in parts if part.first and not lines.isdisjoint(part.span)}
    reached: set[str] = set()
    while wanted:
        reached |= wanted
        uses = {name for part in parts if part.name in wanted for name in part.uses}
        wanted = (uses & known) - reached
    return [part.as_json() for part in parts if part.name in reached]


@functools.lru_cache(64)
def _parts(path: str) -> tuple[str, list[_Part]]:
    """SHA-256 and parts of a file, read once: a process runs what it has imported."""
    try:
        with open(path, "rb") as stream:
            data = stream.read(_MAX_BYTES)
        return hashlib.sha256(data).hexdigest(), _read_parts(data)
    except (OSError, ValueError):
        return "", []
