"""Registry of database formats: those of the installed libraries, and those of entry points of the
group `tuna.exporters`."""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any, TypeAlias

from tuna.common.messages import choices
from tuna.errors import BadInput, LibraryMissing
from tuna.libraries import compressed, registry
from tuna.libraries.exporter import Exporter, LineNames
from tuna.plugins import Plugins

AnyExporter: TypeAlias = Exporter[Any]
#: Classes of exporters of results of any library, by name
_GENERIC: Plugins[type[AnyExporter]] = Plugins("tuna.exporters", "exporter", type)


@functools.cache
def _generic() -> tuple[AnyExporter, ...]:
    return tuple(exporter() for exporter in _GENERIC.all().values())


@functools.cache
def _found() -> tuple[tuple[AnyExporter, ...], str]:
    """All exporters, and which libraries could not be loaded; a broken plug-in must not hide the
    others."""
    found, broken = list(_generic()), [*_GENERIC.broken().values()]
    for name in registry.names():
        try:
            found += registry.get_library(name).exporters
        except LibraryMissing as error:
            broken.append(str(error))
    return tuple(found), " ".join(broken)


def exporters() -> Sequence[AnyExporter]:
    """Every exporter there is, by form; if several have the same form, none can be chosen by it
    (see `exporter`)."""
    return sorted(_found()[0], key=lambda exporter: exporter.form)


def forms() -> list[str]:
    """Return the names that `--form` takes, sorted."""
    return sorted({exporter.form for exporter in exporters()})


def exporter(form: str) -> AnyExporter:
    """The exporter of a form; raises BadInput with the forms there are, or where two libraries
    claim it."""
    found = [exporter for exporter in exporters() if exporter.form == form]
    if not found:
        broken = _found()[1]
        raise BadInput(
            f"Unknown database form {form!r}{f' ({broken})' if broken else ''}.",
            hint=choices(form, forms(), "forms"),
        )
    if len(found) > 1:
        claimed = " and ".join(f"{type(one).__module__}.{type(one).__qualname__}" for one in found)
        raise BadInput(
            f"Several libraries bring a form {form!r}: {claimed}.", hint="uninstall one of them"
        )
    return found[0]


def line_names(path: Path, number: int) -> LineNames:
    """The layer, solvers and device that a line of a database is about; raises BadInput.

    Libraries are loaded until one knows the format, since loading all of them takes a second.
    """
    head = compressed.head(path)
    found: Iterable[AnyExporter] = _generic()
    for name in (None, *registry.names()):
        if name is not None:
            with contextlib.suppress(LibraryMissing):
                found = registry.get_library(name).exporters
        for one in found:
            if not one.is_directory and one.recognises(path, head):
                return one.names_at(path, number)
    raise BadInput(f"{path} is not a database that Tuna reads.", hint="see: `tuna export --help`")


def exporter_of(path: Path) -> AnyExporter:
    """The exporter of a file's format, by its contents; raises BadInput if there is none, or the
    file cannot be read."""
    head = b"" if path.is_dir() else compressed.head(path)
    for found in exporters():
        if path.is_dir() == found.is_directory and found.recognises(path, head):
            return found
    if not path.is_dir() and not head.strip():
        raise BadInput(f"{path} is empty.")
    titles = ", ".join(found.title for found in exporters())
    raise BadInput(f"{path} is not a database that Tuna reads.", hint=f"it reads: {titles}")
