"""The child process that reads, builds and checks models. Imports TVM; the command line never does.

A user's mistake is not an exception here but an answer, which `process` raises again.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import asdict
from pathlib import Path
from typing import Any

import tvm

from tuna.configs import TaskConfig, from_json
from tuna.libraries.tvm import toolchain
from tuna.models import build, choosing, importer, inputs, timing
from tuna.models.build import Record, TaskKernels
from tuna.models.manifest import Class
from tuna.models.process import refusing


@refusing
def locations(path: str) -> dict[str, Any]:
    """The places of its weights that the model file names, unchecked."""
    return {"locations": importer.locations(Path(path))}


@refusing
def inspect(
    path: str, target: str, shapes: Mapping[str, Any], batch: int | None, text: str
) -> dict[str, Any]:
    """Return the model's tasks, and the texts of those without a core.

    The module's text is written to the file `text`.
    """
    model = importer.read(Path(path), shapes, batch)
    module = importer.to_relax(model, Path(path).name)
    planned = build.plan(module, TaskKernels(_target(target), {}, winograd=False), _target(target))
    Path(text).write_text(planned.text)
    return {
        "opset": importer.opset(model),
        "inputs": [
            {
                **given,
                "bounds": found["bounds"],
                "parameter": found["name"] if found["name"] != given["name"] else "",
            }
            for given, found in zip(importer.inputs_of(model), inputs.of(module), strict=True)
        ],
        "tasks": [[task.to_json(), count] for task, count in planned.tasks()],
        "bodies": planned.bodies,
        "tvm": tvm.__version__,
    }


@refusing
def estimate(tasks: list[dict[str, Any]], target: str, bodies: Mapping[str, str]) -> dict[str, Any]:
    """Estimate the cycles of the best point of each solver, by task key.

    `bodies` are the texts of tasks without a core, by their SHA-256.
    """
    cycles = {}
    for task in map(from_json, tasks):
        assert isinstance(task, TaskConfig)
        cycles[task.key] = choosing.estimates(task, _target(target), bodies.get(task.body, ""))
    return {"cycles": cycles}


@refusing
def make(
    path: str,
    target: str,
    shapes: Mapping[str, Any],
    records: Mapping[str, Any],
    winograd: bool,
    compare_on: Mapping[str, Any] | None,
    output: str,
) -> dict[str, Any]:
    """Build the model into the shared library `output`.

    `records` are lists of [solver, params, whether of a similar task] by task key, the best first.
    With `compare_on`, arguments of `inputs.values`, they are timed in the model on these inputs,
    together with the predicted kernel.
    """
    model = importer.read(Path(path), shapes)
    module = importer.to_relax(model, Path(path).name)
    known = {key: [Record(*record) for record in found] for key, found in records.items()}
    given = None if compare_on is None else list(inputs.values(**compare_on).values())
    kernels, compared = choosing.choose(
        module, known, _target(target), winograd=winograd, compare_on=given
    )
    planned = build.plan(module, kernels, _target(target))
    build.compile_to(planned, _target(target), Path(output))
    # compared tasks were measured, even where the predicted kernel was the fastest
    measured = dict.fromkeys(compared, Class.EXACT)
    return {
        "classes": {key: str(found) for key, found in {**kernels.classes, **measured}.items()},
        "functions": {name: task.key for name, task in planned.functions.items()},
        "calls": dict(planned.calls),
        "compared": {key: asdict(found) for key, found in compared.items()},
        "refused_records": kernels.refused,
    }


@refusing
def make_untuned(path: str, target: str, shapes: Mapping[str, Any], output: str) -> dict[str, Any]:
    """Build the model as TVM does without Tuna, into the shared library `output`."""
    model = importer.read(Path(path), shapes)
    planned = build.plan(importer.to_relax(model, Path(path).name), None, _target(target))
    build.compile_to(planned, _target(target), Path(output))
    return {}


@refusing
def check(
    path: str,
    shapes: Mapping[str, Any],
    library: str,
    given: Mapping[str, Any],
    rivals: bool,
    threads: int,
    untuned: str,
) -> dict[str, Any]:
    """Return errors against the reference, times, and times of functions; see `timing.compare`.

    `given` are arguments of `inputs.values`.
    """
    model, values = importer.read(Path(path), shapes), inputs.values(**given)
    return timing.compare(
        model, Path(library), values, rivals=rivals, threads=threads, untuned=untuned
    )


def _target(text: str) -> Any:
    # kernels in a model are those that were tuned
    return tvm.target.Target(toolchain.for_code(json.loads(text)))


HANDLERS = {
    "locations": locations,
    "inspect": inspect,
    "estimate": estimate,
    "make": make,
    "make_untuned": make_untuned,
    "check": check,
}
