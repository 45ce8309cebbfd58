"""Registry of libraries: entry points of the group `tuna.libraries`, loaded lazily.

Those of the group `tuna.libraries.simulated` only pretend to measure, and are available only with
TUNA_SIMULATED=1.
"""

from __future__ import annotations

import functools
from importlib.metadata import EntryPoint, EntryPoints, entry_points

import structlog

from tuna.common.messages import choices
from tuna.errors import LibraryMissing, NotFound
from tuna.libraries.base import FINALS, Library
from tuna.libraries.steps import every_step
from tuna.plugins import PluginFailed, foreign_code
from tuna.settings import get_settings
from tuna.vocabulary import SEARCH

log = structlog.get_logger(__name__)

GROUP = "tuna.libraries"
SIMULATED_GROUP = "tuna.libraries.simulated"


def names() -> list[str]:
    """The names of all libraries that may be used here, sorted."""
    return sorted(_points())


@functools.cache
def get_library(name: str) -> Library:
    """This process's instance of the library; raises NotFound with the names there are,
    LibraryMissing for one that cannot be used."""
    points = _points()
    if name not in points:
        if is_simulated(name):
            raise NotFound(
                f"The library {name} only pretends to measure.",
                hint="to use it all the same: TUNA_SIMULATED=1",
            )
        raise NotFound(f"Unknown library {name!r}.", hint=choices(name, points, "installed"))
    try:
        with foreign_code():
            library: Library = points[name].load()()
            every_step(library)
            parts = ((library.search, SEARCH), (library.finals, FINALS))
            steps = [(part.step.name, expected) for part, expected in parts if part is not None]
    except PluginFailed as error:
        raise LibraryMissing(f"The library {name} cannot be loaded: {error}") from error
    for step, expected in steps:  # jobs are recognized by the names of their steps
        if step != expected:
            raise LibraryMissing(
                f"The library {name} cannot be used: its step `{expected}` is called {step!r}.",
                hint=f"its author has to call it {expected!r}",
            )
    return library


@functools.cache
def find_library(name: str) -> Library | None:
    """The library, or None if it cannot be used here, which is logged once: other processes may
    have it."""
    try:
        return get_library(name)
    except (NotFound, LibraryMissing) as error:
        log.warning(
            "library missing: its results wait for a coordinator that has it",
            library=name,
            fault=str(error),
        )
        return None


def is_simulated(name: str) -> bool:
    """Whether an installed library of this name only pretends to measure."""
    return name in installed(SIMULATED_GROUP).names


def _points() -> dict[str, EntryPoint]:
    groups = (GROUP, SIMULATED_GROUP) if get_settings().simulated else (GROUP,)
    return {point.name: point for group in groups for point in installed(group)}


@functools.cache
def installed(group: str) -> EntryPoints:
    """The entry points of a group, read from the metadata of all packages once a process."""
    return entry_points(group=group)
