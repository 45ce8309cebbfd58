"""Runs items' steps in this process, without queue or SQL: for `tuna reproduce`, for libraries that
Tuna did not build, and for a debugger."""

from __future__ import annotations

import contextlib
import tempfile
from collections.abc import Generator, Iterable, Sequence
from pathlib import Path
from typing import Any

from tuna.artifacts.files import folder_url
from tuna.artifacts.store import Artifacts
from tuna.libraries.base import Library
from tuna.libraries.context import RunContext
from tuna.libraries.items import Candidate, StepResult, WorkItem
from tuna.libraries.steps import find_step, steps_to
from tuna.sandbox.core_lending import BuildCores
from tuna.sandbox.cores import compile_cpus
from tuna.settings import get_settings
from tuna.vocabulary import Resource
from tuna.workers.devices import device_for, measuring_on


def measure_built(
    library: Library, items: Sequence[WorkItem], given: Iterable[bytes]
) -> Generator[StepResult, None, None]:
    """Yield the results of items whose candidates are built, measured one after the other while
    this process has the device.

    `given`: the artifacts that they name. Ends the library.
    """
    step = library.steps[-1]
    with tempfile.TemporaryDirectory(prefix="tuna-") as folder, contextlib.closing(library):
        device = device_for(library, get_settings())
        context = RunContext(_store(Path(folder), given), Path(folder), device.cpus, device)
        with measuring_on(device):
            yield from library.run(step, items, context)


def _store(folder: Path, given: Iterable[bytes]) -> Artifacts:
    """A store of artifacts in a folder."""
    artifacts = Artifacts(folder_url(folder / "artifacts"), folder / "cache")
    for data in given:
        artifacts.put(data)
    return artifacts


def run_steps(
    library: Library,
    item: WorkItem,
    last: str,
    index: int | None = None,
    given: Iterable[bytes] = (),
) -> list[StepResult]:
    """The results of the library's steps up to `last`; of candidate `index` alone when it is given.

    The first of them builds the candidates of the item; if it has none, those that the library
    proposes. `given`: the artifacts that it names, such as the body of its config.
    """
    results: list[StepResult] = []
    with tempfile.TemporaryDirectory(prefix="tuna-") as folder:
        artifacts = _store(Path(folder), given)
        for name in steps_to(library, last):
            step = find_step(library, name)
            device = (
                device_for(library, get_settings()) if step.resource is Resource.DEVICE else None
            )
            builds = None if device else BuildCores(compile_cpus())
            cpus = device.cpus if device else compile_cpus()
            context = RunContext(artifacts, Path(folder), cpus, device, builds=builds)
            update: dict[str, Any] = {"step": name}
            if results:
                good = [trial for trial in results[-1].trials if trial.cause is None]
                update["candidates"] = tuple(
                    Candidate(index=trial.index, artifact=trial.artifact) for trial in good
                )
            with measuring_on(device) if device else contextlib.nullcontext():
                result = next(iter(library.run(step, [item.model_copy(update=update)], context)))
            if index is not None:
                result = result.model_copy(
                    update={"trials": tuple(t for t in result.trials if t.index == index)}
                )
            results.append(result)
            if not result.ok:
                break
        library.close()
    return results
