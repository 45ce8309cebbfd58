"""Libraries that entry points name: those that cannot be used are refused with a sentence."""

from __future__ import annotations

from collections.abc import Collection, Iterable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any

import pytest

from tuna.api import checks as doctor
from tuna.errors import LibraryMissing
from tuna.libraries import registry
from tuna.libraries.base import Finals, Library, SearchRules, Step
from tuna.libraries.steps import find_step
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


def test_a_library_that_cannot_be_imported_is_broken_and_not_absent(install: Any) -> None:
    """`tuna doctor` said "absent", and ended with 0."""

    def fails() -> Library:
        raise ImportError("cannot import name 'Candidates'")

    install(fails)
    found = doctor.of_library("toy")
    assert (found.ok, found.absent) == (False, False)
    assert "cannot be loaded: ImportError: cannot import name 'Candidates'" in found.text
    assert found.hint
