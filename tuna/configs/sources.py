"""Sources: files other than lists of layers that `tuna tune` and `tuna import` take, registered
under the entry point group `tuna.sources`:

    [project.entry-points."tuna.sources"]
    kernels = "my_package.source:SOURCE"
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

from tuna.configs.files import ParsedFile
from tuna.errors import BadInput
from tuna.plugins import Plugins


@dataclass(frozen=True)
class Source:
    """A kind of file, known by how its name ends."""

    endings: tuple[str, ...]  #: such as `.py`
    noun: str  #: such as "kernel"
    plural: str
    #: "module:attribute" of the click command behind `tuna tune FILE`.
    tune: str
    #: Reads configs at the shapes of a JSON file for `tuna import`; None: such files have none that
    #: stand alone.
    read: Callable[[Path, Path], ParsedFile] | None = None
    #: In the help of `tuna tune`: what such a file holds ("a model"), and a sentence on
    #: how it is tuned.
    holds: str = "other files"
    help: str = ""


SOURCES: Plugins[Source] = Plugins("tuna.sources", "source", Source)


def source_of(path: Path) -> Source | None:
    """Return the source that a file is; None for a list of layers."""
    return next((one for one in SOURCES.all().values() if path.suffix in one.endings), None)


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
