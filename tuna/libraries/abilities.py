"""Abilities of some libraries, each a class to inherit beside `Library`, and the answers for
libraries that lack them."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Mapping

from tuna.configs import Config
from tuna.errors import BadInput
from tuna.libraries.base import Environment, Library
from tuna.libraries.items import WorkItem
from tuna.vocabulary import kind_text


class CrossCompiling(ABC):
    """A library that compiles for devices that this machine lacks."""

    #: true if each job has one candidate, so that commands that repeat it need not name it
    one_candidate: bool = False

    @abstractmethod
    def toolchain(self) -> str:
        """Return `Environment.toolchain`, also without a device; raises LibraryMissing."""

    @abstractmethod
    def environment_by_hand(self, facts: Mapping[str, str]) -> Environment:
        """Return the environment of another machine, described by `facts`; raises BadInput where
        they make no sense."""

    def names_target(self, item: WorkItem) -> bool:
        """Whether the command that repeats the item must name its target."""
        return False


class ExplainsUnsupported(ABC):
    """A library that can say why it has no solver for a config."""

    @abstractmethod
    def unsupported(self, config: Config) -> str:
        """Return the feature of a config without a solver that no solver supports, such as
        "transposed convolutions"; empty where the config needs no solver."""


def toolchain_of(library: Library) -> str:
    """Identifies who may compile for the library on this machine; raises LibraryMissing."""
    if isinstance(library, CrossCompiling):
        return library.toolchain()
    return library.environment().toolchain


def environment_of(library: Library, facts: Mapping[str, str]) -> Environment:
    """Return the environment of this machine, or of the one that `facts` describe; raises BadInput,
    LibraryMissing."""
    if facts and isinstance(library, CrossCompiling):
        return library.environment_by_hand(facts)
    check_facts(library, facts)
    return library.environment()


def check_facts(library: Library, facts: Mapping[str, str], *known: str) -> None:
    """Raise BadInput if there are other `facts` of an environment than the `known` ones."""
    if others := sorted(facts.keys() - set(known)):
        takes = f"it takes {', '.join(known)}"
        raise BadInput(
            f"{library.name} takes no {' and no '.join(others)}.",
            hint=takes if known else "it finds out its environment by itself",
        )


def unsupported_feature(library: Library, config: Config) -> str:
    """Return the feature of a config without a solver that the library lacks: by default its kind.
    Empty where nothing is lacking."""
    if isinstance(library, ExplainsUnsupported):
        return library.unsupported(config)
    known = "this " if config.kind in library.kinds else ""
    return f"{known}{kind_text(config.kind)}"
