"""TVM as a library of Tuna. This process never imports TVM: the children of `CandidateLibrary`
do."""

from __future__ import annotations

import json
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any, Literal

from pydantic import Field, field_validator

from tuna.configs import Config
from tuna.errors import LibraryMissing
from tuna.libraries.abilities import CrossCompiling, ExplainsUnsupported, check_facts
from tuna.libraries.base import Environment, Solver
from tuna.libraries.boards import BoardProcesses, Boards, board_settings, installed_boards
from tuna.libraries.candidate_children import ChildKind
from tuna.libraries.candidates import CandidateOptions
from tuna.libraries.context import RunContext
from tuna.libraries.items import WorkItem
from tuna.libraries.measuring_processes import MeasuringProcesses
from tuna.libraries.options import CACHES, LAYOUTS, Condition
from tuna.libraries.params_text import ParamsText
from tuna.libraries.searching import SearchingLibrary, SearchOptions
from tuna.libraries.tvm import toolchain
from tuna.libraries.tvm.decisions import built_in_prior, by_name, facts_of, readable
from tuna.libraries.tvm.kernels.instructions import FLAGS, dots_of
from tuna.libraries.tvm.solvers import (
    FUNCTION,
    MODEL,
    SEARCHED,
    TABLE,
    applicable,
    core_of,
    sums_words,
    unsupported,
)
from tuna.libraries.tvm.tvm_db import TvmDatabaseExporter
from tuna.sandbox.discovery import CPU


class TvmJobOptions(SearchOptions):
    """Job options of TVM."""

    strategy: Literal["search", "random"] = Field(
        "search",
        description=(
            "way of choosing candidates of MetaSchedule's space: by a search that learns, or at"
            " random"
        ),
    )
    first: str = Field(
        "",
        max_length=1000,
        description=(
            "point of a family's space to try first, as `tuna query` has it; ignored where it"
            " is not"
        ),
    )

    @field_validator("strategy", mode="before")
    @classmethod
    def _has_an_end(cls, strategy: object) -> object:
        if strategy == "exhaustive":
            raise ValueError(
                "MetaSchedule's spaces have up to 10^15 points, which nobody can try; take search"
                " or random, with more --trials"
            )
        return strategy


class TvmLibrary(SearchingLibrary, CrossCompiling, ExplainsUnsupported):
    """The tuner for TVM on this machine's CPU, or on boards.

    Layers in fp32 have kernels of our own (`kernels/`), others are searched with MetaSchedule.

    The defaults of its limits: importing TVM on a loaded machine can take half a minute. Most
    candidates build in under a second and winograd's in 4 s; a few unroll into code that LLVM
    optimises for minutes, and such a one has never been the fastest.
    """

    name = "tvm"
    kinds = ("convolution", "gemm", "attention", "task", "model")
    device_kind = CPU
    options = TvmJobOptions
    params = ParamsText(readable, by_name, facts_of, built_in_prior)
    in_rounds = frozenset(row.name for row in (*SEARCHED, FUNCTION))
    exporters = (TvmDatabaseExporter(),)
    conditions = (
        *SearchingLibrary.conditions,
        LAYOUTS,
        Condition(
            "winograd", ("yes", "no"), "no: direct sums only, whose rounding errors are smaller"
        ),
    )
    builder = "tuna.libraries.tvm.kernel_child:TvmBuilder"
    loader = "tuna.libraries.tvm.kernel_child:TvmLoader"
    wide_solvers = (MODEL.name,)
    forkable = True  # TVM starts its threads with the first parallel kernel

    def __init__(self, boards: Boards | None = None) -> None:
        self._boards = boards
        self._on_boards: BoardProcesses | None = None
        self._words: dict[str, Sequence[str]] = {}
        self._lacking = ""
        super().__init__()

    def measuring_processes(self, kind: ChildKind) -> MeasuringProcesses:
        """Return forks on this machine, or what measures on boards."""
        if self._boards is None:
            return super().measuring_processes(kind)
        self._on_boards = self._boards.processes(kind)
        return self._on_boards

    def environment(self) -> Environment:
        """CPU, measuring cores and TVM version, or a board's; with TUNA_TVM_TARGET_ALONE that of
        the target, which the board can run."""
        board = self._on_boards.environment() if self._on_boards else None
        return self.environment_of_target() or board or toolchain.host_environment()

    def environment_of_target(self) -> Environment | None:
        """The environment that the target alone describes, where TUNA_TVM_TARGET_ALONE says so."""
        settings = board_settings()
        if not settings.tvm_target_alone:
            return None
        return toolchain.target_environment(settings.tvm_target)

    def environment_by_hand(self, facts: Mapping[str, str]) -> Environment:
        """Return the environment for `target`, on a board with `device_key` that the tracker
        `tvm_tracker` (HOST:PORT) has."""
        check_facts(self, facts, "target", "tvm_tracker", "device_key")
        if facts.get("tvm_tracker") or facts.get("device_key"):
            found = installed_boards().environment_by_hand(facts)
        else:
            found = toolchain.target_environment(facts.get("target", ""))
        toolchain.check(json.loads(found.target))
        return found

    def toolchain(self) -> str:
        """Return the versions of TVM and of the kernels."""
        return toolchain.toolchain_of()

    def solvers(self) -> Sequence[Solver]:
        """Every way to express a layer."""
        return [row.solver for row in TABLE]

    def applicable(
        self, configs: Iterable[Config], environment: Environment
    ) -> Iterator[tuple[Config, Sequence[str]]]:
        """Apply the rules of the solvers' table, without families that sum words which the target
        has no instruction for."""
        for config in configs:
            names = applicable(config, environment.target, environment.conditions)
            families = {name for name in names if sums_words(name, config)}
            self._lacking = self._lacking_words(config, environment.target) if families else ""
            yield config, [name for name in names if not (self._lacking and name in families)]

    def _lacking_words(self, config: Config, target: str) -> str:
        """Return what the target's CPU lacks for words of the config's type, in a few words; empty
        for one that lacks nothing, and without TVM to ask."""
        if target not in self._words:
            try:
                self._words[target] = toolchain.words_of(target)
            except LibraryMissing:
                return ""
        kind = core_of(config).data_type
        dots = dots_of(kind)
        if any(dot.name in self._words[target] for dot in dots):
            return ""
        return f"{kind.value} on a CPU without {FLAGS[dots[-1].feature]}"

    def unsupported(self, config: Config) -> str:
        """Apply the rules of the solvers' table, to the config that `applicable` yielded last."""
        return self._lacking or unsupported(config)

    def names_target(self, item: WorkItem) -> bool:
        """Whether it is that of boards; to measure there again needs the settings of their
        workers."""
        return "mtriple" in item.target

    def _job(self, item: WorkItem, asked: CandidateOptions, context: RunContext) -> dict[str, Any]:
        """A model is timed run after run, as it is used, whatever the session says of caches: its
        weights take them."""
        job = super()._job(item, asked, context)
        if item.solver == MODEL.name:
            job["conditions"] |= {CACHES.name: CACHES.values[0]}
        return job

    def child_variables(self, threads: int) -> Mapping[str, str]:
        """TVM's threads, which stay where the sandbox puts them."""
        given = {"TUNA_CC": board_settings().cc} if board_settings().cc else {}
        pinned = {"TVM_NUM_THREADS": str(threads), "TVM_BIND_THREADS": "0"}
        return {**super().child_variables(threads), **pinned, **given}
