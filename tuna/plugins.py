"""Plug-ins: the entry points of a group, loaded lazily and independently of each other."""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Iterator, Mapping
from importlib.metadata import EntryPoint, entry_points
from typing import Any, Generic, TypeVar
from weakref import WeakSet

from tuna.errors import BadInput, LibraryMissing, NotFound

T = TypeVar("T")


_GROUPS: WeakSet[Plugins[Any]] = WeakSet()


class PluginFailed(Exception):
    """The code of a plug-in raised an exception, which is named."""


@contextlib.contextmanager
def foreign_code() -> Iterator[None]:
    """Raise PluginFailed in place of whatever a plug-in's code raises, such as SystemExit: others
    must not depend on it. Ctrl-C passes."""
    try:
        yield
    except KeyboardInterrupt:
        raise
    except BaseException as error:
        raise PluginFailed(f"{type(error).__name__}: {error}") from error


class Plugins(Generic[T]):
    """The objects that the entry points of `group` name, instances of `of`, each loaded once."""

    def __init__(self, group: str, noun: str, of: type[T]) -> None:
        """`noun` names a plug-in in messages, such as `kind of config`."""
        self._group, self._noun, self._of = group, noun, of
        self._loaded: dict[str, T] = {}
        self._failures: dict[str, str] = {}
        _GROUPS.add(self)
        #: number that changes whenever `names` may have changed, so that caches can follow
        self.generation = 0

    @functools.cached_property
    def _points(self) -> dict[str, EntryPoint]:
        return {point.name: point for point in entry_points(group=self._group)}

    def names(self) -> list[str]:
        """Sorted names of all plug-ins, including those that cannot be loaded."""
        return sorted({*self._points, *self._loaded})

    def get(self, name: str) -> T:
        """Return the plug-in called `name`; raises NotFound, or BadInput if it cannot be loaded."""
        found = self._loaded.get(name)
        if found is not None:
            return found
        if name not in self._points:
            raise NotFound(f"unknown {self._noun} {name!r}; Tuna has {', '.join(self.names())}")
        if name not in self._failures:
            try:
                with foreign_code():
                    loaded = self._points[name].load()
                    if not isinstance(loaded, self._of):
                        raise TypeError(f"{self._points[name].value} is not a {self._of.__name__}")
            except PluginFailed as error:
                self._failures[name] = str(error)
            else:
                self._loaded[name] = loaded
                return loaded
        raise BadInput(f"the {self._noun} {name} cannot be loaded: {self._failures[name]}")

    def broken(self) -> Mapping[str, str]:
        """Return the sentence for each plug-in that cannot be loaded, by name."""
        found: dict[str, str] = {}
        for name in self.names():
            try:
                self.get(name)
            except BadInput as error:
                found[name] = str(error)
        return found

    def all(self) -> Mapping[str, T]:
        """Return every loadable plug-in by its name, in order; the others are logged."""
        found: dict[str, T] = {}
        for name in self.names():
            known = name in self._failures
            try:
                found[name] = self.get(name)
            except BadInput as error:
                if not known:
                    import structlog

                    structlog.get_logger(__name__).warning(
                        "plug-in not loaded", group=self._group, reason=str(error)
                    )
        return found

    def only(self, purpose: str, package: str) -> T:
        """Return the first plug-in; raises LibraryMissing, without one, which says that `purpose`
        needs a package."""
        for plugin in self.all().values():
            return plugin
        raise LibraryMissing(f"{purpose} the package {package}.", hint=f"pip install {package}")

    @contextlib.contextmanager
    def adding(self, name: str, plugin: T) -> Iterator[None]:
        """Have `plugin` under `name` until the block ends; raises BadInput if the name is taken."""
        if name in self.names():
            raise BadInput(f"there is a {self._noun} {name!r} already")
        self._loaded[name] = plugin
        self.generation += 1
        try:
            yield
        finally:
            del self._loaded[name]
            self.generation += 1


def broken_plugins() -> list[tuple[str, str]]:
    """Return name and sentence of each plug-in that cannot be loaded, of the groups that this
    process uses."""
    return sorted(failure for group in set(_GROUPS) for failure in group.broken().items())
