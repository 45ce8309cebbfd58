"""Base of the libraries that tests make up: one solver, which takes every config."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from typing import ClassVar

from tuna.configs import Config
from tuna.libraries.base import Environment, Solver
from tuna.libraries.candidates import CandidateLibrary


class OneSolverLibrary(CandidateLibrary):
    """Products on a made-up device; a subclass says what its candidates do."""

    kinds = ("gemm",)
    solver: ClassVar[str] = "Toy"
    device_name: ClassVar[str] = ""

    def environment(self) -> Environment:
        return Environment(self.name, "1", "any", 1, f"{self.name}-1", device=self.device_name)

    def solvers(self) -> Sequence[Solver]:
        return [Solver(self.solver, self.kinds, "GEMM")]

    def applicable(
        self, configs: Iterable[Config], environment: Environment
    ) -> Iterator[tuple[Config, Sequence[str]]]:
        return ((config, [self.solver]) for config in configs)
