"""TVM as a library of Tuna. This process never imports TVM: the children of `CandidateLibrary`
do."""

from __future__ import annotations

import json
import shlex
from collections.abc import Iterable, Iterator, Mapping, Sequence

from pydantic import Field

from tuna.configs import Config
from tuna.libraries.base import Environment, Solver
from tuna.libraries.items import WorkItem
from tuna.libraries.options import LAYOUTS, Condition
from tuna.libraries.searching import SearchingLibrary, SearchOptions
from tuna.libraries.tvm import boards, environment, targets
from tuna.libraries.tvm.params import readable
from tuna.libraries.tvm.solvers import SEARCHED, TABLE, applicable, unsupported
from tuna.libraries.tvm.tvm_db import TvmDatabaseExporter
from tuna.sandbox.discovery import DeviceKind
from tuna.settings import get_settings


class TvmJobOptions(SearchOptions):
    """Job options of TVM."""

    first: str = Field(
        "",
        max_length=1000,
        description=(
            "point of a family's space to try first, as `tuna query` has it; ignored where it"
            " is not"
        ),
    )


class TvmLibrary(SearchingLibrary):
    """The tuner for TVM on this machine's CPU.

    Layers in fp32 have kernels of our own (`kernels/`), others are searched with MetaSchedule.

    The defaults of its limits: importing TVM on a loaded machine can take half a minute. Most
    candidates build in under a second and winograd's in 4 s; a few unroll into code that LLVM
    optimises for minutes, and such a one has never been the fastest.
    """

    name = "tvm"
    kinds = ("convolution", "gemm", "task")
    device_kind = DeviceKind.CPU
    options = TvmJobOptions
    in_rounds = frozenset(row.name for row in SEARCHED)
    exporters = (TvmDatabaseExporter(),)
    conditions = (
        *SearchingLibrary.conditions,
        LAYOUTS,
        Condition(
            "winograd", ("yes", "no"), "no: direct sums only, whose rounding errors are smaller"
        ),
    )
    builder = "tuna.libraries.tvm.compiler:TvmBuilder"
    loader = "tuna.libraries.tvm.evaluator:TvmLoader"
    forkable = True  # TVM starts its threads with the first parallel kernel

    def environment(self) -> Environment:
        """CPU, measuring cores and TVM version; with TUNA_TVM_TARGET_ALONE that of the target."""
        return self.environment_of_target() or environment.describe()

    def environment_of_target(self) -> Environment | None:
        """The environment that the target alone describes, where TUNA_TVM_TARGET_ALONE says so."""
        settings = get_settings()
        return (
            boards.environment_by_hand({"target": settings.tvm_target})
            if settings.tvm_target_alone
            else None
        )

    def environment_by_hand(self, facts: Mapping[str, str]) -> Environment:
        """Return the environment for `target`, on a board with `device_key` that the tracker
        `tvm_tracker` (HOST:PORT) has."""
        self.check_facts(facts, "target", "tvm_tracker", "device_key")
        found = boards.environment_by_hand(facts)
        targets.check(json.loads(found.target))
        return found

    def toolchain(self) -> str:
        """Return the versions of TVM and of the kernels."""
        return environment.toolchain()

    def solvers(self) -> Sequence[Solver]:
        """Every way to express a layer."""
        return [row.solver for row in TABLE]

    def applicable(
        self, configs: Iterable[Config], environment: Environment
    ) -> Iterator[tuple[Config, Sequence[str]]]:
        """Apply the rules of the solvers' table."""
        return (
            (config, applicable(config, environment.target, environment.conditions))
            for config in configs
        )

    def unsupported(self, config: Config) -> str:
        """Apply the rules of the solvers' table."""
        return unsupported(config)

    def reproduce(self, item: WorkItem, index: int | None = None) -> str:
        """Return the command line of every library, with the target if it is that of boards; to
        measure there again needs the settings of their workers."""
        words = super().reproduce(item, index)
        return f"{words} --target {shlex.quote(item.target)}" if "mtriple" in item.target else words

    def readable_params(self, params: str) -> str:
        """The decisions of the schedule."""
        return readable(params)

    def child_variables(self, threads: int) -> Mapping[str, str]:
        """TVM's threads, which stay where the sandbox puts them."""
        given = {"TUNA_CC": get_settings().cc} if get_settings().cc else {}
        pinned = {"TVM_NUM_THREADS": str(threads), "TVM_BIND_THREADS": "0"}
        return {**super().child_variables(threads), **pinned, **given}
