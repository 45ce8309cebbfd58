"""The steps of a library's jobs: which there are, what follows, and the command line that repeats
one."""

from __future__ import annotations

import shlex
from collections.abc import Sequence

from tuna.common.messages import choices
from tuna.errors import BadInput, NotFound
from tuna.libraries.abilities import CrossCompiling
from tuna.libraries.base import FINALS, Library, Step
from tuna.libraries.items import StepResult, WorkItem
from tuna.vocabulary import SEARCH


def every_step(library: Library) -> Sequence[Step]:
    """Return the steps of its jobs, those of searches and of finals too."""
    return (
        *([library.search.step] if library.search else ()),
        *library.steps,
        *([library.finals.step] if library.finals else ()),
    )


def find_step(library: Library, name: str) -> Step:
    """Return the step called `name`; raises NotFound with the steps there are."""
    for step in every_step(library):
        if step.name == name:
            return step
    raise NotFound(
        f"{library.name} has no step {name!r}.",
        hint=choices(name, (s.name for s in library.steps), "steps"),
    )


def served_steps(library: Library, names: Sequence[str]) -> Sequence[Step]:
    """Return the steps with these names (all when empty), the search with any on a CPU, the finals
    with any on the device."""
    steps = every_step(library)
    chosen = {find_step(library, name) for name in names} or set(steps)
    resources = {step.resource for step in chosen}
    return [
        step
        for step in steps
        if step in chosen or (step.name in (SEARCH, FINALS) and step.resource in resources)
    ]


def next_step(result: StepResult, steps: Sequence[str]) -> str | None:
    """Return the step after a good `result`, None when the job, or this round of it, is done: a
    search that proposes nothing has exhausted its space."""
    if result.step == SEARCH and not result.trials:
        return None
    position = steps.index(result.step) + 1
    return steps[position] if position < len(steps) else None


def steps_to(library: Library, name: str) -> Sequence[str]:
    """Return the steps that a job must go through to get `name` done, it included: what `tuna
    reproduce` runs; raises BadInput, NotFound."""
    step, names = find_step(library, name), [known.name for known in library.steps]
    if name == FINALS:
        raise BadInput(
            "Finals cannot be repeated by themselves.",
            hint="take the command that their attempt has",
        )
    before = names[: names.index(name)] if step.needs is None else step.needs
    return [*before, name]


def command_line(library: Library, item: WorkItem, index: int | None = None) -> str:
    """Return the command line that repeats the item, or one candidate of it, when pasted; not that
    of finals."""
    words = ["tuna", "reproduce", "--library", library.name, "--step", item.step]
    words += ["--solver", item.solver, "--seed", str(item.seed)]
    for option, values in (("--option", item.options), ("--condition", item.conditions)):
        for key, value in sorted(values.items()):
            words += [option, f"{key}={value}"]
    crossing = library if isinstance(library, CrossCompiling) else None
    if index is not None and not (crossing and crossing.one_candidate):
        words += ["--index", str(index)]
    words.append(item.layer.text())
    words += ["--target", item.target] if crossing and crossing.names_target(item) else []
    return shlex.join(words)
