"""Conditions of measurement: what a session may choose of how its results are measured, besides its
machine."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from tuna.errors import BadInput
from tuna.messages import choices


@dataclass(frozen=True)
class Condition:
    """One choice that a library offers its sessions; results measured under different values are
    not comparable."""

    name: str
    values: tuple[str, ...]  #: the default first
    meaning: str


#: For kernels that run on this machine's cores; one with its own clock cannot be measured cold.
CACHES = Condition(
    "caches",
    ("warm", "cold"),
    "cold: the caches are emptied before each run, and one run is timed at a time",
)

#: For convolutions, whose kernels often read and write blocks of channels.
LAYOUTS = Condition(
    "layouts",
    ("layer", "native"),
    "layer: input and answer lie as the layer says, and conversions are timed; native: they lie as"
    " the kernel likes them (blocks of channels, mostly), and changing their layout is not part of"
    " the time. Weights are packed ahead in both.",
)


def chosen(offered: Sequence[Condition], given: Mapping[str, str], library: str) -> dict[str, str]:
    """Return the conditions in `given` that are not the default, sorted by name.

    Raises BadInput for a condition or a value that the library does not offer.
    """
    by_name = {condition.name: condition for condition in offered}
    for name, value in given.items():
        if name not in by_name:
            raise BadInput(
                f"{library} has no condition {name!r}.",
                hint=choices(name, by_name, "its conditions"),
            )
        if value not in by_name[name].values:
            raise BadInput(
                f"The condition {name} cannot be {value!r}.",
                hint=f"one of: {', '.join(by_name[name].values)}",
            )
    return {
        name: value for name, value in sorted(given.items()) if value != by_name[name].values[0]
    }


def complete(offered: Sequence[Condition], given: Mapping[str, str]) -> dict[str, str]:
    """Every condition of a library with its value: that of `given`, else the default."""
    return {condition.name: given.get(condition.name, condition.values[0]) for condition in offered}
