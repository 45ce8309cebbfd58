"""Takes sample jobs of a library through all of their steps, as the pipeline would, and keeps
everything that happened."""

from __future__ import annotations

import traceback
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from tuna.artifacts.files import folder_url
from tuna.artifacts.store import Artifacts
from tuna.configs import Config
from tuna.libraries.base import Library, Step
from tuna.libraries.context import DeviceHandle, RunContext
from tuna.libraries.items import Candidate, StepResult, WorkItem
from tuna.libraries.steps import find_step, next_step
from tuna.sandbox.cores import eval_cpus

#: Maximum of steps of a job, against endless loops
_MAX_STEPS = 100


def run_context(folder: Path) -> RunContext:
    """Return the context of a worker on this machine: a store in a folder, a scratch folder, the
    cores that measure."""
    scratch = folder / "scratch"
    scratch.mkdir(parents=True, exist_ok=True)
    cpus = eval_cpus()
    store = Artifacts(folder_url(folder / "artifacts"), folder / "cache")
    device = DeviceHandle(id=f"cpu{cpus[0]}", cpus=cpus)
    return RunContext(artifacts=store, scratch=scratch, cpus=cpus, device=device)


@dataclass
class Turn:
    """One call of `Library.run`: several items of one step."""

    step: Step
    items: Sequence[WorkItem]
    before: Sequence[str]  #: the items as JSON before the call
    results: list[StepResult] = field(default_factory=list)
    error: str = ""  #: traceback, if `run` raised

    def pairs(self) -> list[tuple[WorkItem, StepResult]]:
        """Each item with its results, by job."""
        return [
            (item, result)
            for item in self.items
            for result in self.results
            if result.job_id == item.job_id
        ]


def rehearse(
    library: Library,
    configs: Sequence[Config],
    context: RunContext,
    options: Mapping[str, Any],
    max_jobs: int,
) -> list[Turn]:
    """Run up to `max_jobs` jobs through the library's steps, those that wait for the same step in
    one call."""
    waiting = {item.job_id: item for item in _first_items(library, configs, options, max_jobs)}
    names = [step.name for step in library.steps]
    turns: list[Turn] = []
    while waiting and len(turns) < _MAX_STEPS:
        step = find_step(library, next(iter(waiting.values())).step)
        items = [item for item in waiting.values() if item.step == step.name]
        turn = Turn(step, items, [item.model_dump_json() for item in items])
        turns.append(turn)
        for item in items:
            del waiting[item.job_id]
        try:
            turn.results.extend(library.run(step, items, context))
        except Exception:  # whatever a library raises is a finding
            turn.error = traceback.format_exc()
        # One result per job goes on: what is doubled or foreign is found by the suite.
        for item, result in {item.job_id: (item, result) for item, result in turn.pairs()}.values():
            following = next_step(result, names) if result.ok and result.step in names else None
            if following is not None:
                waiting[item.job_id] = follow(item, result, following)
    return turns


def follow(item: WorkItem, result: StepResult, step: str) -> WorkItem:
    """The item of the next step: what was built well goes along."""
    built = tuple(
        Candidate(index=t.index, artifact=t.artifact)
        for t in result.trials
        if t.cause is None and t.artifact
    )
    update = {"step": step, "attempt": item.attempt + 1, "candidates": built or item.candidates}
    return item.model_copy(update=update)


def _first_items(
    library: Library, configs: Sequence[Config], options: Mapping[str, Any], max_jobs: int
) -> list[WorkItem]:
    environment = library.environment()
    jobs = [
        (config, name)
        for config, names in library.applicable(configs, environment)
        for name in names or ()
    ]
    return [
        WorkItem(
            job_id=1000 - 7 * number,  # neither consecutive nor ascending
            attempt=1 + number % 3,
            session_id=1,
            library=library.name,
            step=library.steps[0].name,
            solver=solver,
            config=config.to_json(),
            target=environment.target,
            seed=number + 1,
            options=dict(options),
        )
        for number, (config, solver) in enumerate(jobs[:max_jobs])
    ]
