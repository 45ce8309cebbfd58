"""The child that asks oneDNN what it has: its version, and the implementations of layers."""

from __future__ import annotations

import functools
from collections.abc import Sequence
from typing import Any

from tuna.configs import from_json
from tuna.libraries.onednn.capi import Dnnl
from tuna.libraries.onednn.implementations import listed
from tuna.libraries.onednn.operations import channels_last, operation_of
from tuna.libraries.onednn.solvers import allowed, by_solver, has_exact_int8


def describe(path: str) -> dict[str, Any]:
    """Version, the instruction set that it uses on this CPU, and what its threads are."""
    library = load(path)
    return {"version": library.version, "isa": library.isa, "runtime": library.runtime}


def applicable(path: str, configs: Sequence[dict[str, Any]], native: bool) -> dict[str, Any]:
    """For each config the solvers that have an implementation."""
    return {"solvers": [list(solvers_of(load(path), config, native)) for config in configs]}


def solvers_of(library: Dnnl, facts: dict[str, Any], native: bool) -> dict[str, list[str]]:
    """The implementations of each solver that applies to a config."""
    config = from_json(facts)
    operation = operation_of(config)
    if operation is None:
        return {}
    found = listed(library, operation, allowed(config.kind, channels_last(config), native))
    if operation.geometry and operation.source.data_type == "int8":
        found = {
            layout: [name for name in names if has_exact_int8(name, library.has_vnni)]
            for layout, names in found.items()
        }
    return by_solver(config.kind, found)


@functools.cache
def load(path: str) -> Dnnl:
    """The library at `path`, loaded once."""
    return Dnnl(path)


HANDLERS = {"describe": describe, "applicable": applicable}
