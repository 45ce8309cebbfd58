"""Libraries that entry points name: those that cannot be used are refused with a sentence."""

from __future__ import annotations

import sys
from collections.abc import Collection, Iterable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any

import pytest

from tuna.api import checks as doctor
from tuna.errors import LibraryMissing
from tuna.libraries import registry
from tuna.libraries.base import Finals, Library, SearchRules, Step
from tuna.libraries.steps import find_step
from tuna.plugins import Plugins, broken_plugins
from tuna.testing.noop import NoopLibrary
from tuna.vocabulary import Resource


@dataclass
class Point:
    """An entry point of a library."""

    made: type[Library]

    def load(self) -> type[Library]:
        return self.made


class OneRound(SearchRules):
    def __init__(self, step: Step) -> None:
        self.step = step

    def solvers(self, names: Iterable[str], options: Mapping[str, Any]) -> Collection[str]:
        return ()


@pytest.fixture()
def install(monkeypatch: pytest.MonkeyPatch) -> Iterator[Any]:
    """`install(library)`: it is the library `toy`."""
    registry.get_library.cache_clear()
    yield lambda made: monkeypatch.setattr(registry, "_points", lambda: {"toy": Point(made)})
    registry.get_library.cache_clear()


@pytest.mark.parametrize(("name", "part"), [("search", OneRound), ("finals", Finals)])
def test_a_library_whose_search_or_finals_have_another_name_is_refused(
    install: Any, name: str, part: type[OneRound] | type[Finals]
) -> None:
    """Its searches ended after their first round, without a word."""
    install(type("Other", (NoopLibrary,), {name: part(Step("propose", Resource.CPU))}))
    with pytest.raises(
        LibraryMissing,
        match=f"library toy cannot be used: its step `{name}` is called 'propose'",
    ) as caught:
        registry.get_library("toy")
    assert caught.value.hint == f"its author has to call it '{name}'"
    install(type("Right", (NoopLibrary,), {name: part(Step(name, Resource.CPU))}))
    assert find_step(registry.get_library("toy"), name).name == name


class Unusual(BaseException):
    pass


@pytest.mark.parametrize("place", ["import", "search", "steps", "finals", "environment"])
@pytest.mark.parametrize(
    "fault", [ImportError("no name 'Candidates'"), SystemExit(3), Unusual("of its own")], ids=repr
)
def test_a_library_that_raises_is_broken_and_not_absent(
    install: Any, place: str, fault: BaseException
) -> None:
    """`tuna doctor` said "absent" and ended with 0, or ended with 3 and without a word."""

    def fails(*_: object) -> Any:
        raise fault

    broken = fails if place == "environment" else property(fails)
    install(fails if place == "import" else type("Broken", (NoopLibrary,), {place: broken}))
    found = doctor.of_library("toy")
    assert (found.ok, found.absent) == (False, False)
    what = "failed" if place == "environment" else "cannot be loaded"
    assert found.text == f"The library toy {what}: {type(fault).__name__}: {fault}"
    assert found.hint


def test_an_interrupt_ends_a_command_that_loads_plug_ins(install: Any) -> None:
    def interrupted() -> Library:
        raise KeyboardInterrupt

    install(interrupted)
    with pytest.raises(KeyboardInterrupt):
        registry.get_library("toy")


def test_a_plug_in_that_exits_when_it_is_imported_is_named(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    plugins: Plugins[dict[str, Any]] = Plugins("tuna.commands", "set of commands", dict)
    monkeypatch.setattr(Point, "load", lambda _: sys.exit(3))
    monkeypatch.setattr(plugins, "_points", {"toy": Point(NoopLibrary)})
    assert plugins.all() == {}
    failure = "the set of commands toy cannot be loaded: SystemExit: 3"
    assert ("toy", failure) in broken_plugins()
