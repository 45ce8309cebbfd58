"""Which libraries are installed: entry points of the group `tuna.libraries`, loaded when they are asked for."""

from __future__ import annotations

import functools
from importlib.metadata import entry_points

from tuna.errors import LibraryMissing, NotFound
from tuna.libraries.base import Library


def names() -> list[str]:
    """The names of all installed libraries, sorted."""
    return sorted(point.name for point in entry_points(group="tuna.libraries"))


@functools.cache
def get_library(name: str) -> Library:
    """This process's instance of the library; raises NotFound with the names there are."""
    for point in entry_points(group="tuna.libraries", name=name):
        try:
            library: Library = point.load()()
        except Exception as error:  # a plug-in's own code: whatever it raises, the others must go on working
            raise LibraryMissing(f"The library {name} cannot be loaded: {type(error).__name__}: {error}") from error
        return library
    raise NotFound(f"There is no library {name!r}.", hint=f"installed: {', '.join(names())}")
