"""A library that searches in rounds, with predictable results: what a round proposes is a function
of what the search is told.

Anything that changed what a round is told (an order, a result that came early or was lost) would
change what it proposes, and so the set of trials.
"""

from __future__ import annotations

import hashlib
import json
import os
import time
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from pydantic import Field

from tuna.jobs import history
from tuna.libraries import options
from tuna.libraries.base import RoundsOutcome, SearchRules, Step
from tuna.libraries.context import RunContext
from tuna.libraries.items import StepResult, Trial, WorkItem, result_of
from tuna.testing.noop import NoopLibrary, NoopOptions
from tuna.vocabulary import Cause, Resource

BATCH = 8
ROUNDS = 8
_POLL_S = 0.01
#: A folder; while it has the file `hold_name`, an item is not done.
HOLD = "SEARCHES_HOLD"


def hold_name(step: str, solver: str, k: int, number: int) -> str:
    """Of a round of the search of a GEMM."""
    return f"{step}-{solver}-{k}-{number}"


class SearchOptions(NoopOptions):
    rounds: int = Field(ROUNDS, ge=1, description="of each search")


class FixedRounds(SearchRules):
    step = Step("search", Resource.CPU, chunk=2, urgent=True)

    def solvers(self, names: Iterable[str], options: Mapping[str, Any]) -> Collection[str]:
        return [name for name in names if int(name[-1]) < 5]

    def ends(self, given: Mapping[str, Any], outcome: RoundsOutcome) -> str | None:
        asked = options.read(SearchOptions, given)
        return f"{asked.rounds} rounds" if outcome.opened >= asked.rounds else None

    def max_rounds(self, given: Mapping[str, Any]) -> int | None:
        return options.read(SearchOptions, given).rounds


class SearchLibrary(NoopLibrary):
    """The first five solvers search in rounds; the others have one."""

    name = "searches"
    options = SearchOptions
    search: SearchRules = FixedRounds()
    steps = (Step("build", Resource.CPU, chunk=2), Step("measure", Resource.DEVICE, chunk=2))

    def run(
        self, step: Step, items: Sequence[WorkItem], context: RunContext
    ) -> Iterator[StepResult]:
        for item in items:
            begun = time.time()
            _wait(item)
            try:
                trials = self._trials(step, item, context)
            except KeyError:
                yield result_of(item, ok=False, cause=Cause.ARTIFACT_LOST)
                continue
            yield result_of(
                item, ok=True, trials=trials, simulated=True, started_at=begun, ended_at=time.time()
            )

    def _trials(self, step: Step, item: WorkItem, context: RunContext) -> tuple[Trial, ...]:
        if step is self.search.step:
            told = history.read([context.artifacts.get(digest) for digest in item.history])
            names = proposals(item.solver, item.config, told)
            return tuple(Trial(index=index, params=name) for index, name in enumerate(names))
        if step.resource is Resource.CPU:
            wanted = [(one.index, one.params or "") for one in item.candidates] or [
                (0, item.solver)
            ]
            return tuple(
                Trial(index=index, params=name, artifact=context.artifacts.put(name.encode()))
                for index, name in wanted
            )
        return tuple(
            Trial(index=one.index, times_ms=(time_ms,), time_ms=time_ms)
            for one in item.candidates
            for time_ms in [time_of(context.artifacts.get(one.artifact or "").decode())]
        )


def _wait(item: WorkItem) -> None:
    folder = os.environ.get(HOLD)
    name = hold_name(item.step, item.solver, item.config["k"], item.round)
    while folder and Path(folder, name).exists():
        time.sleep(_POLL_S)


def proposals(
    solver: str, config: Mapping[str, Any], told: Sequence[Sequence[Mapping[str, Any]]]
) -> list[str]:
    """The params that a round proposes after what it is told of the rounds before."""
    text = json.dumps([solver, dict(config), told], sort_keys=True)
    return [hashlib.sha256(f"{number}/{text}".encode()).hexdigest()[:16] for number in range(BATCH)]


def time_of(params: str) -> float:
    """The time (ms) of a candidate."""
    return 1.0 + int(hashlib.sha256(params.encode()).hexdigest()[:8], 16) / 2**32


def expected(solver: str, config: Mapping[str, Any], rounds: int = ROUNDS) -> list[list[str]]:
    """The params of each round of a search, as the rule of `pipeline.rounds` has it."""
    found: list[list[str]] = []
    for _ in range(rounds):
        told: list[list[dict[str, Any]]] = [
            [{"params": name, "time_ms": time_of(name), "cause": None} for name in one]
            for one in found[:-1]
        ]
        told += [[{"params": name} for name in one] for one in found[-1:]]
        found.append(proposals(solver, config, told))
    return found
