"""The library: softmax in C, with an unroll factor."""

from __future__ import annotations

import platform
from collections.abc import Iterable, Iterator, Sequence

from tuna.configs import Config
from tuna.libraries.base import Environment, Solver
from tuna.libraries.candidates import CandidateLibrary
from tuna.sandbox.cores import eval_cpus


class SoftmaxLibrary(CandidateLibrary):
    """One solver for a kind of its own."""

    name = "csoftmax"
    kinds = ("softmax",)
    builder = "tuna_softmax.kernel:CSoftmax"
    loader = "tuna_softmax.kernel:CSoftmax"
    forkable = True

    def environment(self) -> Environment:
        return Environment(self.name, "1", platform.machine(), len(eval_cpus()), "cc")

    def solvers(self) -> Sequence[Solver]:
        return [Solver("CSoftmaxRows", self.kinds, "Direct")]

    def applicable(
        self, configs: Iterable[Config], environment: Environment
    ) -> Iterator[tuple[Config, Sequence[str]]]:
        return (
            (config, ["CSoftmaxRows"] if config.kind == "softmax" else []) for config in configs
        )
