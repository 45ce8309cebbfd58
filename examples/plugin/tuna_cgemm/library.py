"""What Tuna sees of the library: what is installed, which solvers there are, and where they
apply."""

from __future__ import annotations

import functools
import platform
from collections.abc import Iterable, Iterator, Sequence

from tuna.configs import Config, DataType, GemmConfig
from tuna.errors import LibraryMissing
from tuna.libraries.base import Environment, Solver
from tuna.libraries.candidates import CandidateLibrary
from tuna.libraries.params_text import ParamsText, json_object
from tuna.sandbox.cores import eval_cpus
from tuna.sandbox.processes import run

SOLVER = "CGemmTiled"


def readable(params: str) -> str:
    """Params as reports show them, such as `tile 32, unroll 4`."""
    return ", ".join(f"{name} {value}" for name, value in json_object(params).items())


class CGemmLibrary(CandidateLibrary):
    """Matrix products of fp32 in C, compiled by the system's compiler."""

    name = "cgemm"
    kinds = ("gemm",)
    params = ParamsText(readable)
    builder = "tuna_cgemm.kernel:CGemm"
    loader = "tuna_cgemm.kernel:CGemm"
    forkable = True

    def environment(self) -> Environment:
        """The kind of CPU, the number of cores that measure, and the compiler."""
        machine, compiler = platform.machine(), cc_version()
        return Environment(self.name, "1", machine, len(eval_cpus()), f"cc-{compiler}-{machine}")

    def solvers(self) -> Sequence[Solver]:
        """One way to multiply."""
        return [Solver(SOLVER, self.kinds, "GEMM")]

    def applicable(
        self, configs: Iterable[Config], environment: Environment
    ) -> Iterator[tuple[Config, Sequence[str]]]:
        """By `fits`."""
        return ((config, [SOLVER] if fits(config) else []) for config in configs)


def fits(config: Config) -> bool:
    """Whether it is one product of fp32 matrices, neither of them transposed."""
    if not isinstance(config, GemmConfig) or config.data_type is not DataType.FP32:
        return False
    return config.batch_count == 1 and not config.trans_a and not config.trans_b


@functools.cache
def cc_version() -> str:
    """Such as 12.2.0; raises LibraryMissing when there is no compiler."""
    done = run(["cc", "-dumpfullversion", "-dumpversion"], timeout_s=30)
    if done.returncode:
        raise LibraryMissing("There is no C compiler here.", hint="apt-get install gcc")
    return done.output.strip()
