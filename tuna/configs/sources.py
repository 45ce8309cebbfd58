"""Sources: files other than lists of layers that `tuna tune` and `tuna import` take, registered
under the entry point group `tuna.sources`:

    [project.entry-points."tuna.sources"]
    kernels = "my_package.source:SOURCE"
"""

from __future__ import annotations

import importlib
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from tuna.common.files import text_encoding
from tuna.common.messages import choices
from tuna.configs.files import ParsedFile
from tuna.errors import BadInput, LibraryMissing
from tuna.plugins import Plugins


@dataclass(frozen=True)
class Source:
    """A kind of file, known by how its name ends."""

    endings: tuple[str, ...]  #: endings of the files' names, such as `.py`
    noun: str  #: noun for such a file in messages, such as "kernel"
    plural: str
    #: "module:attribute" of the click command behind `tuna tune FILE`
    tune: str
    #: function for `tuna import` that reads configs at the shapes of a JSON file; None: such files
    #: have no configs that stand alone
    read: Callable[[Path, Path], ParsedFile] | None = None
    #: noun for the contents ("a model") in the help of `tuna tune`, then a sentence on how they are
    #: tuned
    holds: str = "other files"
    help: str = ""
    #: Module of the functions for such files that the service calls; empty: none.
    api: str = ""
    #: names of tasks without a core whose functions come with a schedule, or need none
    scheduled: frozenset[str] = frozenset()


SOURCES: Plugins[Source] = Plugins("tuna.sources", "source", Source)
#: Distribution with the source, by ending of a file that the core alone does not read
_DISTRIBUTIONS = {".onnx": "tuna-models", ".pt2": "tuna-models", ".py": "tuna-triton"}
#: Bytes of a file that tell a text from what is not, and bytes that a text lacks
_HEAD_BYTES, _CONTROLS = 512, frozenset(range(9))


def source_of(path: Path) -> Source | None:
    """Return the source that a file is; None for a list of layers. Raises LibraryMissing where the
    package for such files is not installed, BadInput for a file that is neither of the two."""
    ending = path.suffix.lower()
    for source in SOURCES.all().values():
        if ending in source.endings:
            return source
    if ending in _DISTRIBUTIONS:
        raise _missing(path.name, _DISTRIBUTIONS[ending])
    if path.is_file() and _is_binary(path):
        raise BadInput(
            f"{path.name} is not a list of layers, which is a text, and does not end as a model or"
            " a kernel does.",
            hint=choices(ending, _DISTRIBUTIONS, "endings"),
        )
    return None


def _is_binary(path: Path) -> bool:
    """Whether a file begins with control characters that no text has; UTF-16 is a text."""
    with path.open("rb") as file:
        head = file.read(_HEAD_BYTES)
    return text_encoding(head) == "utf-8" and not _CONTROLS.isdisjoint(head)


def api_of(name: str) -> Any:
    """Return the module with the functions of the source of this name; raises LibraryMissing where
    its package is not installed."""
    if name not in SOURCES.names():
        raise _missing(f"What works on {name}", f"tuna-{name}")
    return importlib.import_module(SOURCES.get(name).api)


def _missing(what: str, package: str) -> LibraryMissing:
    return LibraryMissing(f"{what} needs the package {package}.", hint=f"pip install {package}")


def read_source(source: Source, path: Path, shapes: Path | None) -> ParsedFile:
    """Return the configs of a file at its shapes; raises BadInput where there are none."""
    if source.read is None:
        raise BadInput(
            f"{path} is a {source.noun}, not a list of layers.", hint=f"`tuna tune {path}` tunes it"
        )
    if shapes is None:
        raise BadInput(
            f"{path} is a {source.noun}, and nothing says for which shapes.",
            hint="give a file with a list of them: --shapes shapes.json",
        )
    return source.read(path, shapes)
