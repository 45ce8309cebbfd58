"""oneDNN as a library of Tuna. This process never loads oneDNN: children of the sandbox do."""

from __future__ import annotations

import itertools
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import ClassVar

from tuna.configs import Config
from tuna.errors import BadInput
from tuna.libraries.base import Environment, Solver
from tuna.libraries.candidates import OneStepLibrary
from tuna.libraries.onednn import environment
from tuna.libraries.onednn.solvers import SOLVERS
from tuna.libraries.options import LAYOUTS, Condition, complete
from tuna.sandbox.discovery import DeviceKind

#: Configs in one request to a child; each takes some milliseconds.
_BATCH = 100


class OneDnnLibrary(OneStepLibrary):
    """Measures oneDNN's implementations on this machine's CPU. There is one step: its code is
    generated where it runs."""

    name = "onednn"
    kinds = ("convolution", "gemm")
    device_kind = DeviceKind.CPU
    conditions: Sequence[Condition] = (*OneStepLibrary.conditions, LAYOUTS)
    builder = "tuna.libraries.onednn.implementations:OneDnnBuilder"
    loader = "tuna.libraries.onednn.implementations:OneDnnLoader"
    suffix: ClassVar[str] = ".json"
    #: importing the loader does not load oneDNN, so there are no threads yet
    forkable: ClassVar[bool] = True

    def environment(self) -> Environment:
        """CPU, measuring cores and oneDNN's version."""
        return environment.describe()

    def solvers(self) -> Sequence[Solver]:
        """Every family of implementations with every layout."""
        return SOLVERS

    def applicable(
        self, configs: Iterable[Config], environment: Environment
    ) -> Iterator[tuple[Config, Sequence[str]]]:
        """Return the solvers that oneDNN lists on this machine; raises BadInput for a session of
        another CPU or version."""
        here = self.environment()
        for what in ("library_version", "arch"):
            there = getattr(environment, what)
            if there != getattr(here, what):
                raise BadInput(
                    f"The session's {what.replace('_', ' ')} is {there}, and here it is"
                    f" {getattr(here, what)}.",
                    hint=(
                        "oneDNN lists its implementations only on such a machine: work it out there"
                    ),
                )
        native = complete(self.conditions, environment.conditions)["layouts"] == "native"
        return self._applicable(iter(configs), native)

    def child_variables(self, threads: int) -> Mapping[str, str]:
        """Each thread stays on its core; generated code is kept for the last few primitives
        only."""
        bound = {
            "OMP_PROC_BIND": "true",
            "OMP_DYNAMIC": "false",
            "ONEDNN_PRIMITIVE_CACHE_CAPACITY": "16",
        }
        return {**super().child_variables(threads), **bound}

    def _applicable(
        self, configs: Iterator[Config], native: bool
    ) -> Iterator[tuple[Config, Sequence[str]]]:
        asked, path = (
            environment.child("tuna.libraries.onednn.implementations"),
            str(environment.library_path()),
        )
        try:
            while batch := list(itertools.islice(configs, _BATCH)):
                known = [config for config in batch if config.kind in self.kinds]
                facts = [config.to_json() for config in known]
                answer = environment.ask(
                    asked, "applicable", path=path, configs=facts, native=native
                )
                names = dict(zip((config.key for config in known), answer["solvers"], strict=True))
                yield from ((config, names.get(config.key, [])) for config in batch)
        finally:
            asked.close()
