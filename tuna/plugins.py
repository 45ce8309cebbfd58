"""Plug-ins: the entry points of one group, loaded lazily; one that fails does not affect the
others."""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Iterator, Mapping
from importlib.metadata import EntryPoint, entry_points
from typing import Generic, TypeVar

from tuna.errors import BadInput, NotFound

T = TypeVar("T")


class Plugins(Generic[T]):
    """What the entry points of `group` name, each an instance of `of`; loaded once in the life of a
    process."""

    def __init__(self, group: str, noun: str, of: type[T]) -> None:
        """`noun` is what messages call one of them, such as `kind of config`."""
        self._group, self._noun, self._of = group, noun, of
        self._loaded: dict[str, T] = {}
        self._failures: dict[str, str] = {}
        #: Changes whenever `names` may have changed: what is computed from the plug-ins is valid
        #: for one generation.
        self.generation = 0

    @functools.cached_property
    def _points(self) -> dict[str, EntryPoint]:
        return {point.name: point for point in entry_points(group=self._group)}

    def names(self) -> list[str]:
        """The names of all, those that cannot be loaded included, sorted."""
        return sorted({*self._points, *self._loaded})

    def get(self, name: str) -> T:
        """The plug-in called `name`; raises NotFound with the names there are, BadInput for one
        that cannot be loaded."""
        found = self._loaded.get(name)
        if found is not None:
            return found
        if name not in self._points:
            raise NotFound(f"unknown {self._noun} {name!r}; Tuna has {', '.join(self.names())}")
        if name not in self._failures:
            try:
                loaded = self._points[name].load()
                if not isinstance(loaded, self._of):
                    raise TypeError(f"{self._points[name].value} is no {self._of.__name__}")
            except (
                Exception
            ) as error:  # a plug-in's own code: whatever it raises, the others must go on working
                self._failures[name] = f"{type(error).__name__}: {error}"
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
        """Every plug-in that can be loaded, by name, in the order of names; the others are
        logged."""
        found: dict[str, T] = {}
        for name in self.names():
            known = name in self._failures
            try:
                found[name] = self.get(name)
            except BadInput as error:
                if not known:
                    import structlog

                    structlog.get_logger(__name__).warning(
                        "a plug-in is left out", group=self._group, reason=str(error)
                    )
        return found

    @contextlib.contextmanager
    def adding(self, name: str, plugin: T) -> Iterator[None]:
        """Have `plugin` under `name` for a while, as if it were installed; raises BadInput if there
        is one already."""
        if name in self.names():
            raise BadInput(f"there is a {self._noun} {name!r} already")
        self._loaded[name] = plugin
        self.generation += 1
        try:
            yield
        finally:
            del self._loaded[name]
            self.generation += 1
